"""Ctrl-C and SIGTERM end a run after the step at hand, with everything saved."""

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context in which the first signal is noted, and a second Ctrl-C ends at once (130)."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def __enter__(self) -> "StopRequest":
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
