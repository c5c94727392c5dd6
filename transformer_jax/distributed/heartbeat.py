"""The trainer's side of supervision: heartbeats for the process that watches the trainer.

A process has at most one supervisor, so the state is global in this module. Without a supervisor,
these functions do nothing.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from contextlib import suppress

VARIABLE = "TRANSFORMER_JAX_HEARTBEAT"
"""Environment variable with the file descriptor of the pipe to the supervisor."""

# `Meter.add` waits for step n - 2, so a beat for step n proves that step n - 2 is done. Consecutive
# messages are three beats apart, so the time between them covers at least one whole step.
BEATS_PER_MESSAGE = 3
# The time, in seconds, in which a trainer may save after its supervisor has ended.
ORPHAN_SECONDS = 30.0

_pipe: int | None = None
_beats = 0
"""The number of beats since the last phase."""


def connect() -> bool:
    """Start the heartbeat if this process has a supervisor; return whether it has one.

    From then on, the process ends when its supervisor does, and SIGUSR2 prints its stacks.
    """
    global _pipe
    if _pipe is None and VARIABLE in os.environ:
        _pipe = int(os.environ.pop(VARIABLE))
        # Training must not wait for a supervisor that does not read the pipe.
        os.set_blocking(_pipe, False)
        # This handler runs in C, so it works while Python waits in a collective.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        threading.Thread(target=_end_with_supervisor, args=(_pipe,), daemon=True).start()
    return _pipe is not None


def beat(step: int) -> None:
    """Report a step. Call this function once per step, after `Meter.add`."""
    global _beats
    _beats += 1
    if _beats % BEATS_PER_MESSAGE == 0:
        _send(f"step {step}")


def busy(phase: str) -> None:
    """Report a phase that may take a long time, such as compilation.

    The phase ends only when a later step is done, because that step waits for the slowest process.
    """
    global _beats
    _beats = 0
    _send(f"busy {phase}")


def report_progress(phase: str, _num_done: int, _total: int) -> None:
    """Report a phase; this function has the type `data.encode.Progress`."""
    busy(phase)


def _send(message: str) -> None:
    if _pipe is not None:
        # A full pipe holds enough messages already. `_end_with_supervisor` handles a broken pipe.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(_pipe, f"{message}\n".encode())


def _end_with_supervisor(pipe: int) -> None:
    """Wait until the supervisor closes its end of the pipe; then save and end this process."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
