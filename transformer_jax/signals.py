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

    If SIGHUP is ignored, it stays ignored, so that a process that `nohup` started continues after
    its terminal is closed. Only the main thread can set handlers, so this context manager does
    nothing in other threads.
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
