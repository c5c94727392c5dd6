"""Rounds of contestants that take turns: A B C, C B A, A B C, ...

So whatever else the machine does meets all of them alike, and what counts is the ratio of two
turns of one round.
"""

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from experiments.benchmark.worker import PACKAGE, Sample, Startup

# Seconds that a turn may take longer than there was time for.
GRACE = 20.0
ROOT = Path(__file__).parents[2]


class WorkerFailedError(Exception):
    """A contestant that takes no part, or no longer, and why."""


@dataclass(frozen=True)
class WorkerSpec:
    """A contestant before it is started."""

    name: str
    task: Mapping[str, Any]
    """Plain data; "maker" names a function of this package that makes an `Entrant` of it."""
    python: str = sys.executable
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that differ; None takes one away."""


class WorkerProcess:
    """A contestant's process, seen from outside."""

    def __init__(self, plan: WorkerSpec) -> None:
        """Start the process; it sets itself up meanwhile."""
        self.name = plan.name
        self.samples: list[Sample] = []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **plan.environment}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # What is executed is this package, by a Python that the user named.
            self._process = subprocess.Popen(  # noqa: S603
                [plan.python, "-m", f"{PACKAGE}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env={k: v for k, v in environment.items() if v is not None},
                # With the processes of its own that compilers start.
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerFailedError(f"{plan.python} cannot be run: {error.strerror}") from error
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(json.dumps(plan.task))

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def _send(self, line: str) -> None:
        if self._process.stdin is not None:
            # Where it is gone already, there is an answer, or an end, that says why.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        seconds = max(0.0, seconds)
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise WorkerFailedError(f"no answer within {seconds:.0f} s") from None
        if not line:
            code = self._process.wait()
            raise WorkerFailedError(f"its process ended with {code}{self._last_stderr_line()}")
        answer = json.loads(line)
        if "left_out" in answer:
            raise WorkerFailedError(answer["left_out"])
        return answer

    def _last_stderr_line(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def wait_until_ready(self, seconds: float = float("inf")) -> Startup:
        """Wait until it has done its first call.

        Raises:
            LeftOutError: it cannot take part, or not within so many seconds.
        """
        return Startup(**self._receive(min(seconds, threading.TIMEOUT_MAX)))

    def run(self, steps: int, seconds: float = float("inf")) -> Sample:
        """Let it do so many steps, and wait for them.

        Raises:
            LeftOutError: it failed, or took longer than so many seconds.
        """
        self._send(str(steps))
        return Sample(**self._receive(min(seconds, threading.TIMEOUT_MAX)))

    def close(self) -> None:
        """End the process and whatever it started."""
        if self._stderr.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            # What a process that is gone has not read cannot be written any more.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadyWorker(NamedTuple):
    """A contestant that takes part, and what it said when it was ready."""

    process: WorkerProcess
    startup: Startup


class Rounds(NamedTuple):
    """Rounds that are over."""

    workers: dict[str, ReadyWorker]
    """Contestants with a sample of every round, in order."""
    skipped: dict[str, str]
    """Why others have none."""


def run_rounds(
    plans: Sequence[WorkerSpec],
    *,
    rounds: int,
    steps: int,
    until: float = float("inf"),
    at_once: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Rounds:
    """Start contestants, let them take turns, and end them.

    Args:
        plans: the contestants.
        rounds: how often each has its turn.
        steps: of each turn.
        until: when to be done, on the clock of `time.monotonic`: no round begins that would
            take longer, and whoever is not ready by two thirds of the time is left out.
        at_once: start all together, which is sooner done; else one after the other, so that none
            compiles beside another.
        say: told of each contestant.
    """
    left_out: dict[str, str] = {}
    began = time.monotonic()
    latest = began + (until - began) * 2 / 3
    with contextlib.ExitStack() as stack:
        entered: dict[str, ReadyWorker] = {}
        for contestant in _start_workers(plans, stack, left_out, at_once=at_once):
            try:
                ready = contestant.wait_until_ready(latest - time.monotonic())
            except WorkerFailedError as why:
                left_out[contestant.name] = str(why)
                contestant.close()
                say(f"{contestant.name}: left out, {why}")
                continue
            entered[contestant.name] = ReadyWorker(contestant, ready)
            say(f"{contestant.name}: ready, first call {ready.first_seconds:.1f} s")
        longest = 0.0
        for number in range(rounds):
            before = time.monotonic()
            if number and before + longest > until:
                break
            names = list(entered) if number % 2 == 0 else list(reversed(entered))
            for name in names:
                contestant = entered[name].process
                try:
                    sample = contestant.run(steps, until + GRACE - time.monotonic())
                except WorkerFailedError as why:
                    left_out[name] = str(why)
                    del entered[name]
                    say(f"{name}: left out, {why}")
                    continue
                contestant.samples.append(sample)
            longest = max(longest, time.monotonic() - before)
    return Rounds(entered, left_out)


def _start_workers(
    plans: Sequence[WorkerSpec],
    stack: contextlib.ExitStack,
    left_out: dict[str, str],
    *,
    at_once: bool,
) -> Iterator[WorkerProcess]:
    """Yield contestants whose process runs; the stack ends it."""

    def start(plan: WorkerSpec) -> Iterator[WorkerProcess]:
        try:
            yield stack.enter_context(WorkerProcess(plan))
        except WorkerFailedError as why:
            left_out[plan.name] = str(why)

    if at_once:
        yield from [contestant for plan in plans for contestant in start(plan)]
    else:
        for plan in plans:
            yield from start(plan)


class Quartiles(NamedTuple):
    """The middle of some numbers, and the middle half of them."""

    median: float
    low: float
    high: float

    @property
    def contains_one(self) -> bool:
        """Whether a ratio of one lies within the middle half."""
        return self.low <= 1 <= self.high


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles; of one number, itself."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)
