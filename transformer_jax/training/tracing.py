"""A trace of some steps, for TensorBoard or Perfetto: where their time goes."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from transformer_jax.errors import StorageError


class StepTracer:
    """A context in which some steps of a run are traced, into its folder `profile/`."""

    def __init__(self, folder: Path, *, after: int, steps: int) -> None:
        """Wait for the step to begin after.

        Args:
            folder: where traces go, each into a folder of its own.
            after: the last step that is not traced; by then most shapes are compiled.
            steps: how many are traced; 0 for none.
        """
        self._folder, self._first, self._last = folder, after, after + steps
        self._is_on = False

    def after(self, step: int, state: Any) -> None:
        """Begin or end, when this step was asked for; `state` is what it gives.

        Raises:
            StorageError: the trace cannot be written.
        """
        if step not in (self._first, self._last) or self._first == self._last:
            return
        # So that the trace has these steps and no others.
        jax.block_until_ready(state)
        if step == self._last:
            self._stop()
            return
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be made: {error.strerror}") from error
        options = jax.profiler.ProfileOptions()
        # Python's own calls would crowd out what the devices do.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._is_on = True

    def _stop(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"a trace could not be written to {self._folder}: {error}"
            ) from error

    def __enter__(self) -> "StepTracer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Keep what was traced of a run that ended before its time."""
        # What ended the run comes first.
        with contextlib.suppress(*[] if error is None else [StorageError]):
            self._stop()
