"""Profiler traces of selected steps, for TensorBoard or Perfetto."""

import contextlib
from pathlib import Path

import jax

from transformer_jax.errors import StorageError, storage_errors


class StepTracer:
    """A context manager that traces consecutive steps of a run."""

    def __init__(self, folder: Path, *, after: int, steps: int) -> None:
        """Trace `steps` steps after step `after`, when most batch shapes are compiled."""
        self._folder, self._first, self._last = folder, after, after + steps
        self._trace = contextlib.ExitStack()

    def after_step(self, step: int, state: object) -> None:
        """Start or stop the trace after this step, if necessary. `state` is the step's output."""
        if step not in (self._first, self._last) or self._first == self._last:
            return
        # Wait for the devices, so that the trace contains exactly the chosen steps.
        jax.block_until_ready(state)
        if step == self._last:
            self._stop()
            return
        with storage_errors(f"{self._folder} cannot be created"):
            self._folder.mkdir(exist_ok=True)
        options = jax.profiler.ProfileOptions()
        # Do not trace Python calls, because they would crowd out the device operations.
        options.python_tracer_level = 0
        self._trace.enter_context(jax.profiler.trace(self._folder, profiler_options=options))

    def _stop(self) -> None:
        try:
            self._trace.close()
        except (OSError, RuntimeError) as error:
            raise StorageError(f"a trace cannot be written to {self._folder}: {error}") from error

    def __enter__(self) -> "StepTracer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Write the trace even if the run ends before the last traced step. If another error ends
        # the run, report that error instead of a storage error.
        with contextlib.nullcontext() if error is None else contextlib.suppress(StorageError):
            self._stop()
