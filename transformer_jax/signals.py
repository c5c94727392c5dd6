"""Signal handlers that are active for a limited time."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that ask a process to save its work and stop."""


@contextlib.contextmanager
def handle_signals(
    handle: Callable[[int, FrameType | None], object] | signal.Handlers,
    numbers: Sequence[signal.Signals] = STOP_SIGNALS,
) -> Iterator[None]:
    """Call `handle` when a signal arrives; on exit, restore the previous handlers.

    An ignored SIGHUP, as with `nohup`, stays ignored. Do nothing outside the main thread.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
