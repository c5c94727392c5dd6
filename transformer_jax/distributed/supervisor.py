"""Monitor a trainer from a parent process, and kill the trainer if it hangs.

If one of several trainers dies or hangs, the others wait for it in a collective operation, where
they run no Python code. JAX may abort the waiting trainers only after a long delay, or not at all.
If each trainer has a supervisor, all trainers exit with a one-line error and a documented exit
code. A supervisor does not import JAX.
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
from transformer_jax.errors import LostProcessError
from transformer_jax.signals import handle_signals

# The number of seconds that the supervisor waits for a message before it checks the timeout.
TICK = 0.5
# The number of seconds that a stuck trainer has to dump its stacks.
STACKS_SECONDS = 1.0
# The timeout is at least PATIENCE times the longest of the last REMEMBERED heartbeat intervals.
PATIENCE, REMEMBERED = 4, 100


@dataclass
class Heartbeats:
    """A trainer's heartbeats and timeouts. All times are in seconds."""

    step_timeout: float
    """The minimum timeout while the trainer is running steps. Slow steps increase the timeout."""
    phase_timeout: float
    """The timeout during a phase, such as compilation, and until a step's duration is known."""
    step: int = 0
    phase: str = "starting"
    """The current phase, or "" while the trainer is running steps."""
    silence: float = 0.0
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The most recent intervals between heartbeats that reported steps."""

    def add_silence(self, seconds: float) -> None:
        """Add `seconds` to `silence`, except for time during which the supervisor was suspended."""
        self.silence += min(seconds, 2 * TICK)

    def receive(self, message: str) -> None:
        """Process a message that `heartbeat` sent."""
        kind, _, value = message.partition(" ")
        if kind == "busy":
            self.phase = value or kind
        else:
            if not self.phase:
                self.intervals.append(self.silence)
            self.step, self.phase = int(value), ""
        self.silence = 0.0

    @property
    def limit(self) -> float:
        """The time without a heartbeat after which the trainer is considered stuck."""
        longest = max(self.intervals, default=0.0)
        # The duration of a step is unknown until two consecutive heartbeats have reported steps.
        if self.phase or not longest:
            return self.phase_timeout
        return max(self.step_timeout, PATIENCE * longest)


def module_command(arguments: Sequence[str], module: str = "transformer_jax") -> list[str]:
    """Return a command that runs a module of this package in UTF-8 mode with this interpreter."""
    # Without -P, `-m` would look for modules in the working directory first.
    safe_path = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    return [sys.executable, "-X", "utf8", *safe_path, "-m", module, *arguments]


def supervise(
    command: Sequence[str],
    run: Path,
    *,
    step_timeout: float,
    phase_timeout: float,
    forwarded_signals: list[int] | None = None,
) -> int:
    """Run a trainer and return its exit code.

    The command must call `heartbeat.connect`. `Heartbeats` describes the timeouts. Error messages
    include the run's folder, `run`. Signals that are forwarded to the trainer are appended to
    `forwarded_signals`.

    Raises:
        LostProcessError: the trainer was stuck and was killed, or a signal other than SIGINT
            terminated it.
    """
    ours, theirs = os.pipe()
    environment = {**os.environ, heartbeat.VARIABLE: str(theirs)}
    # Start the trainer in its own session, so that it receives Ctrl-C only through this process.
    trainer = subprocess.Popen(  # noqa: S603
        command, env=environment, pass_fds=(theirs,), start_new_session=True
    )
    os.close(theirs)

    def forward(number: int, _: object) -> None:
        if forwarded_signals is not None:
            forwarded_signals.append(number)
        trainer.send_signal(number)

    heartbeats = Heartbeats(step_timeout, phase_timeout)
    try:
        with handle_signals(forward):
            code = _wait_for_exit(trainer, ours, heartbeats)
    finally:
        # If the trainer is still alive, closing the pipe causes it to exit.
        os.close(ours)
    if code is None:
        phase = f" while {heartbeats.phase}" if heartbeats.phase else ""
        raise LostProcessError(
            f"no heartbeat for {heartbeats.silence:.0f} s{phase} after step {heartbeats.step}: "
            "this process hung, or a process that it was waiting for hung",
            run,
        )
    if code >= 0:
        return code
    if code == -signal.SIGINT:
        return 128 + signal.SIGINT
    message = f"{signal_name(-code)} ended training after step {heartbeats.step}"
    raise LostProcessError(message, run)


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL", or "signal" and its number if it has no name."""
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


def _wait_for_exit(
    trainer: subprocess.Popen[bytes], pipe: int, heartbeats: Heartbeats
) -> int | None:
    """Read messages until the trainer exits; return its exit code, or None after killing it."""
    rest, is_open, now = b"", True, time.monotonic()
    while heartbeats.silence <= heartbeats.limit:
        # Poll the trainer before reading the pipe, so that the final messages are not missed.
        code = trainer.poll()
        data = b""
        if not is_open:
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(TICK)
        elif select.select([pipe], [], [], TICK if code is None else 0)[0]:
            data = os.read(pipe, 1 << 16)
            is_open = bool(data)
        previous, now = now, time.monotonic()
        heartbeats.add_silence(now - previous)
        *messages, rest = (rest + data).split(b"\n")
        for message in messages:
            heartbeats.receive(message.decode())
        if code is not None:
            return code
    _kill(trainer)
    return None


def _kill(trainer: subprocess.Popen[bytes]) -> None:
    trainer.send_signal(signal.SIGUSR2)
    with suppress(subprocess.TimeoutExpired):
        trainer.wait(STACKS_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    # A device driver may keep the process alive, so do not wait indefinitely.
    with suppress(subprocess.TimeoutExpired):
        trainer.wait(10 * STACKS_SECONDS)
