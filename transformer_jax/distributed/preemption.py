"""What ends a run before its end: a signal, after the step at hand; whatever else, by surprise."""

import signal
import time
from types import FrameType, TracebackType

from transformer_jax.errors import RunInterrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class GracefulShutdown:
    """A context in which the first signal is noted, and a second Ctrl-C ends at once (130).

    Unless it `can_wait`, the first one ends at once too (75): there is nothing to save yet.
    """

    def __init__(self, how_to_go_on: str) -> None:
        self.signal: signal.Signals | None = None
        self.can_wait = False
        self.how_to_go_on = how_to_go_on

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if not self.can_wait:
            self.check()

    def check(self) -> None:
        """End here if a signal came."""
        if self.signal is not None:
            raise RunInterrupted(f"{self.signal.name}: nothing was begun; {self.how_to_go_on}")

    def __enter__(self) -> "GracefulShutdown":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class CheckpointTimer:
    """When to save, beside the schedule: at once, then ever more seldom.

    So each start gets further than the one before, however short it is, and a long one rarely
    pauses.
    """

    SHORTEST = 5.0

    def __init__(self, minutes: float) -> None:
        """Begin.

        Args:
            minutes: the longest from one checkpoint to the next.
        """
        self._longest = 60 * minutes
        self._began: float | None = None
        self._saved = 0.0

    def is_due(self) -> bool:
        """Tell whether it is time; asked after each step."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            return True
        # As long as it went on before the last one, and half of its work at most is lost.
        wait = max(self.SHORTEST, self._saved - self._began)
        return now - self._saved >= min(self._longest, wait)

    def saved(self) -> None:
        """Note that one was saved, for whatever reason."""
        self._saved = time.monotonic()
