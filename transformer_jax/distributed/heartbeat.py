"""The trainer's side of supervision: signs of life for the process that watches it.

Without a supervisor nothing here does anything.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from contextlib import suppress

VARIABLE = "TRANSFORMER_JAX_HEARTBEAT"
"""Names the end of a pipe, a file descriptor, that a supervisor listens to."""

# `Meter.add` waits for the step before the last one: the third step that is begun after a phase
# shows that the first one has arrived, and between every third one lies a whole step.
EVERY = 3
# How long a trainer without its supervisor may take to save.
ORPHAN_SECONDS = 30.0

_pipe: int | None = None
_beats = 0


def connect() -> bool:
    """Begin to beat where a supervisor listens; tell whether one does."""
    global _pipe
    if _pipe is None and VARIABLE in os.environ:
        _pipe = int(os.environ.pop(VARIABLE))
        # Where the supervisor sleeps, training does not wait for it.
        os.set_blocking(_pipe, False)
        # In C, by the signal itself: it works where Python waits in a collective.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        threading.Thread(target=_end_with_supervisor, args=(_pipe,), daemon=True).start()
    return _pipe is not None


def beat(step: int) -> None:
    """Tell that this step was begun, and that `Meter.add` has waited for the one due."""
    global _beats
    _beats += 1
    if _beats % EVERY == 0:
        _tell(f"step {step}")


def busy(doing: str) -> None:
    """Tell what may rightly take long. It lasts until a step that begins later has arrived.

    Not only until this process is done: the next step waits for the slowest one.
    """
    global _beats
    _beats = 0
    _tell(f"busy {doing}")


def _tell(message: str) -> None:
    if _pipe is not None:
        # A full pipe has news enough; a broken one is for the thread below.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(_pipe, f"{message}\n".encode())


def _end_with_supervisor(pipe: int) -> None:
    """Sleep until no one listens any more; then save and end, or end."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
