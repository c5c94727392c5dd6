"""A small parent of one trainer, which ends it where it cannot help itself.

Of several processes that train together, one that is lost or stuck leaves the others waiting in
a collective, where no Python runs, until JAX aborts them from C++, if ever. Each has a parent of
this kind, which knows no JAX: all end, with one line and an exit code that says what to do.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.preemption import SIGNALS
from transformer_jax.errors import LostProcessError

# Seconds.
TICK = 0.5
STACKS = 1.0
# Of the longest time between two signs of life, three steps, among the last so many.
PATIENCE, REMEMBERED = 4, 100


@dataclass
class Heartbeats:
    """What was heard of a trainer, and how long it may be silent."""

    step_timeout: float
    phase_timeout: float
    step: int = 0
    doing: str = "starting"
    """Empty between steps."""
    silent: float = 0.0
    silences: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Between steps: the last ones, so that a stall is forgotten in time."""

    def hear(self, message: str) -> None:
        """Take in a line of `heartbeat`."""
        kind, value = message.split(maxsplit=1)
        if kind == "busy":
            self.doing = value
        else:
            if not self.doing:
                self.silences.append(self.silent)
            self.step, self.doing = int(value), ""
        self.silent = 0.0

    @property
    def limit(self) -> float:
        """How long silence is no bad sign yet, in seconds."""
        longest = max(self.silences, default=0.0)
        # How long a step takes is not known before the first two signs.
        if self.doing or not longest:
            return self.phase_timeout
        return max(self.step_timeout, PATIENCE * longest)


def train_command(arguments: Sequence[str], module: str = "transformer_jax") -> list[str]:
    """Return the command that runs this package with these arguments, as it is running now."""
    # Without -P, `-m` would import from the working directory whatever lies there.
    path = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    return [sys.executable, *path, "-m", module, *arguments]


def supervise(
    command: Sequence[str],
    run: Path,
    *,
    step_timeout: float,
    phase_timeout: float,
    passed_on: list[int] | None = None,
) -> int:
    """Run a trainer and return its exit code.

    Args:
        command: starts it; it beats (`heartbeat`).
        run: its folder, for what is said in the end.
        hang_seconds: of silence between steps, at least, until it is taken for stuck.
        busy_seconds: the same at the start, and while it compiles, scores or saves.
        passed_on: gets each signal that came here and was passed on.

    Raises:
        LostProcessError: it was stuck and was killed, or a signal ended it.
    """
    ours, theirs = os.pipe()
    environment = {**os.environ, heartbeat.VARIABLE: str(theirs)}
    # In a session of its own: a terminal's Ctrl-C comes to it once, from here.
    trainer = subprocess.Popen(  # noqa: S603
        command, env=environment, pass_fds=(theirs,), start_new_session=True
    )
    os.close(theirs)

    def pass_on(number: int, _: object) -> None:
        if passed_on is not None:
            passed_on.append(number)
        trainer.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    pulse = Heartbeats(step_timeout, phase_timeout)
    try:
        code = _watch(trainer, ours, pulse)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # Should the trainer still be there, it sees that no one listens, and ends.
        os.close(ours)
    if code is not None and code >= 0:
        return code
    if code == -signal.SIGINT:
        return 128 + signal.SIGINT
    if code is None:
        doing = f" while {pulse.doing}" if pulse.doing else ""
        what = (
            f"nothing came for {pulse.silent:.0f} s{doing} after step {pulse.step}: this process, "
            f"or another that it waits for, was stuck"
        )
    else:
        what = f"{_name(-code)} ended training after step {pulse.step}"
    raise LostProcessError(what, run)


def _watch(trainer: subprocess.Popen[bytes], pipe: int, pulse: Heartbeats) -> int | None:
    """Listen until the trainer ends; return its code, or None where it had to be killed."""
    rest, is_open, now = b"", True, time.monotonic()
    while True:
        # Asked before the last words are read.
        code = trainer.poll()
        data = b""
        if not is_open:
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(TICK)
        elif select.select([pipe], [], [], TICK if code is None else 0)[0]:
            data = os.read(pipe, 1 << 16)
            is_open = bool(data)
        before, now = now, time.monotonic()
        # Where this process was stopped too, or the whole machine slept, that is no silence.
        pulse.silent += min(now - before, 2 * TICK)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            pulse.hear(line.decode())
        if code is not None:
            return code
        if pulse.silent > pulse.limit:
            _kill(trainer)
            return None


def _kill(trainer: subprocess.Popen[bytes]) -> None:
    """Let a trainer tell where it is stuck, and end it and its children."""
    trainer.send_signal(signal.SIGUSR2)
    with suppress(subprocess.TimeoutExpired):
        trainer.wait(STACKS)
    with suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    # A device's driver may hold on to it: that is no reason to wait for ever.
    with suppress(subprocess.TimeoutExpired):
        trainer.wait(10 * STACKS)


def _name(number: int) -> str:
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")
