"""Heartbeats that a trainer sends to its supervisor, the process that monitors the trainer.

A process has at most one supervisor, so this module's state is global. Without a supervisor, this
module's functions do not send anything.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from contextlib import suppress

from transformer_jax import progress

VARIABLE = "TRANSFORMER_JAX_HEARTBEAT"
"""The environment variable that contains the file descriptor of the pipe to the supervisor."""

# `Meter.wait_for_earlier_step` waits for step n - 2, so a beat for step n implies that step n - 2
# is done. If only every third beat sends a message, at least one whole step runs between two
# consecutive messages.
BEATS_PER_MESSAGE = 3
# The time limit, in seconds, for a trainer to save and exit after its supervisor exits.
ORPHAN_SECONDS = 30.0

_pipe: int | None = None
_beats = 0
"""The number of calls to `beat` since the last call to `busy`."""


def connect() -> bool:
    """Start the heartbeat if this process has a supervisor; return whether it has one.

    If so, this process exits when its supervisor exits, and it dumps its stacks on SIGUSR2. Each
    report of progress calls `busy`.
    """
    global _pipe
    if _pipe is None and VARIABLE in os.environ:
        _pipe = int(os.environ.pop(VARIABLE))
        progress.listeners.append(lambda activity, *_: busy(activity))
        # Training must not block if the supervisor does not read the pipe.
        os.set_blocking(_pipe, False)
        # This handler runs in C, so it works even while the main thread waits in a collective.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        threading.Thread(target=_end_with_supervisor, args=(_pipe,), daemon=True).start()
    return _pipe is not None


def beat(step: int) -> None:
    """Report a step. Call this function once per step, after `Meter.wait_for_earlier_step`."""
    global _beats
    _beats += 1
    if _beats % BEATS_PER_MESSAGE == 0:
        _send(f"step {step}")


def busy(phase: str) -> None:
    """Report the start of a phase that may take a long time, such as compilation.

    The phase ends only when a later step finishes, because that step may wait for other processes
    that are still in the phase.
    """
    global _beats
    _beats = 0
    _send(f"busy {phase}".replace("\n", " "))


def _send(message: str) -> None:
    if _pipe is not None:
        # If the pipe is full, it already contains enough messages. `_end_with_supervisor` handles a
        # broken pipe.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(_pipe, f"{message}\n".encode(errors="replace"))


def _end_with_supervisor(pipe: int) -> None:
    """Wait until the supervisor closes its end of the pipe, and then save and exit."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
