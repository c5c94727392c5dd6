"""Save and stop when a signal arrives, and save often, so that a killed run loses little work."""

import signal
import time
from contextlib import ExitStack
from types import FrameType

from transformer_jax.errors import RunInterrupted
from transformer_jax.signals import handle_signals


class GracefulShutdown(ExitStack):
    """A context manager that handles `STOP_SIGNALS` by stopping training after the current step.

    Until `defers_signals` is set, there is nothing to save, and a signal ends the run immediately
    with `RunInterrupted` (exit code 75). Once `defers_signals` is set, the first signal is only
    recorded in `signal`, and the training loop saves a checkpoint and stops. If Ctrl-C follows an
    earlier signal, the run ends immediately (exit code 130).
    """

    def __init__(self, resume_hint: str) -> None:
        """Create the handler. Error messages end with `resume_hint`."""
        super().__init__()
        self.signal: signal.Signals | None = None
        self.defers_signals = False
        self.resume_hint = resume_hint

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if not self.defers_signals:
            self.check()

    def check(self) -> None:
        """Raise `RunInterrupted` if a signal arrived before the first step."""
        if self.signal is not None:
            raise RunInterrupted(
                f"{self.signal.name}: stopped before the first step; {self.resume_hint}"
            )

    def __enter__(self) -> "GracefulShutdown":
        self.enter_context(handle_signals(self._handle))
        return self


class CheckpointTimer:
    """A timer for recovery checkpoints, which become less and less frequent.

    The first checkpoint is due immediately. Therefore, a run that is often killed early still makes
    progress, and a long run rarely pauses to save.
    """

    MIN_SECONDS = 5.0

    def __init__(self, max_minutes: float) -> None:
        """Set the maximum time between two checkpoints, in minutes."""
        self._max_seconds = 60 * max_minutes
        self._start: float | None = None
        self._last_save = 0.0

    def is_due(self) -> bool:
        """Return whether a checkpoint is due. The first call starts the timer and returns True."""
        now = time.monotonic()
        if self._start is None:
            self._start = now
            return True
        # Wait until the run is twice as old as it was at the last save, so that at most half of the
        # work can be lost.
        wait = max(self.MIN_SECONDS, self._last_save - self._start)
        return now - self._last_save >= min(self._max_seconds, wait)

    def record_save(self) -> None:
        """Reset the timer. Call this method after each checkpoint, scheduled or not."""
        self._last_save = time.monotonic()
