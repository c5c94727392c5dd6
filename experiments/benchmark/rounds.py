"""Run workers in interleaved rounds: A B C, C B A, A B C, ...

Because of this order, other load on the machine affects all workers equally. Each reported ratio
compares two samples from the same round.
"""

import contextlib
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from experiments.benchmark.worker import PACKAGE, Sample, Startup

# A round may continue for this many seconds past the deadline.
GRACE = 20.0
ROOT = Path(__file__).parents[2]
# Matches the folder part of an absolute path.
FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/:'\"]+/)+")


class WorkerFailedError(Exception):
    """A worker cannot run or has failed. The message gives the reason.

    In the message, absolute paths are shortened to file names, so that published results do not
    reveal the names of folders.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(FOLDERS.sub("", reason))


@dataclass(frozen=True)
class WorkerSpec:
    """A description of a worker process to start."""

    name: str
    task: Mapping[str, Any]
    """The task as JSON data. Its "maker" entry names the function that returns the `Workload`."""
    python: str = sys.executable
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables to change; the value None removes a variable."""


@dataclass(frozen=True)
class Settings:
    """Settings that apply to every benchmark."""

    rounds: int = 9
    steps: int = 1
    """Steps per round."""
    torch_python: str = sys.executable
    """The Python interpreter for workers that use other libraries, such as PyTorch."""
    until: float = float("inf")
    """The deadline, as a `time.monotonic()` value. After the first round, a round starts only if
    the longest round so far would fit before the deadline. A worker that is not ready after two
    thirds of the available time is skipped."""
    alone: bool = False
    """Whether each worker runs all its rounds before the next one starts, so that it has the whole
    device and its memory. Otherwise, workers take turns."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables for the workers."""
    say: Callable[[str], None] = lambda _: None
    """A function that receives progress messages."""

    def describe_worker(self, name: str, maker: str, task: Mapping[str, Any]) -> WorkerSpec:
        """Return a worker's spec. `maker` is the name of a function that returns a `Workload`.

        The functions for other libraries are in `peers`, and those for this project are in `tasks`.
        """
        task = {"maker": maker, **task}
        python = self.torch_python if maker.startswith("peers.") else sys.executable
        return WorkerSpec(name, task, python, self.environment)


class WorkerProcess:
    """The parent process's handle to a worker process."""

    startup: Startup
    """The message that the worker sends when it is ready."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Start the process, which prepares its workload in the background.

        Raises:
            WorkerFailedError: the Python interpreter cannot be run.
        """
        self.name = spec.name
        self.samples: list[Sample] = []
        # In a source folder without an installed package, PYTHONPATH may list other libraries.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, **spec.environment}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # The command is safe, because the user chooses the Python interpreter.
            self._process = subprocess.Popen(  # noqa: S603
                [spec.python, "-m", f"{PACKAGE}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env={k: v for k, v in environment.items() if v is not None},
                # Start a new session, so that `close` also kills processes that compilers start.
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerFailedError(f"{spec.python} cannot be run: {error.strerror}") from error
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(json.dumps(spec.task))

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def _send(self, line: str) -> None:
        if self._process.stdin is not None:
            # Ignore a broken pipe: the last message or the exit code shows why the process ended.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        seconds = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise WorkerFailedError(f"no answer within {seconds:.0f} s") from None
        if not line:
            code = self._process.wait()
            raise WorkerFailedError(f"its process ended with {code}{self._last_stderr_line()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise WorkerFailedError(answer["failed"])
        return answer

    def _last_stderr_line(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the worker has finished its first call.

        Raises:
            WorkerFailedError: the worker failed or was not ready in time.
        """
        self.startup = Startup(**self._receive(seconds))

    def run(self, steps: int, seconds: float) -> None:
        """Run the given number of steps, wait for the sample, and store it in `samples`.

        Raises:
            WorkerFailedError: the worker failed or did not respond in time.
        """
        self._send(str(steps))
        self.samples.append(Sample(**self._receive(seconds)))

    def close(self) -> None:
        """Kill the process and its child processes."""
        if self._stderr.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            # If the process has ended, closing its pipe can fail because the buffer cannot be
            # flushed.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rounds(NamedTuple):
    """The results of all rounds."""

    workers: dict[str, WorkerProcess]
    """Workers that have a sample from every round, in the order in which they started."""
    skipped: dict[str, str]
    """The reasons why workers were skipped, keyed by worker name."""


def run_rounds(specs: Sequence[WorkerSpec], settings: Settings) -> Rounds:
    """Start workers, run them in interleaved rounds (unless `alone` is set), and stop them."""
    if settings.alone and len(specs) > 1:
        return _run_alone(specs, settings)
    until, say = settings.until, settings.say
    skipped: dict[str, str] = {}
    began = time.monotonic()
    latest = began + (until - began) * 2 / 3
    with contextlib.ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        for worker in _start_workers(specs, stack, skipped):
            try:
                worker.wait_until_ready(latest - time.monotonic())
            except WorkerFailedError as why:
                skipped[worker.name] = str(why)
                worker.close()
                say(f"{worker.name}: skipped, {why}")
                continue
            workers[worker.name] = worker
            say(f"{worker.name}: ready, first call {worker.startup.first_seconds:.1f} s")
        longest = 0.0
        for number in range(settings.rounds):
            before = time.monotonic()
            if number and before + longest > until:
                break
            names = list(workers) if number % 2 == 0 else list(reversed(workers))
            for name in names:
                try:
                    workers[name].run(settings.steps, until + GRACE - time.monotonic())
                except WorkerFailedError as why:
                    skipped[name] = str(why)
                    del workers[name]
                    say(f"{name}: skipped, {why}")
            longest = max(longest, time.monotonic() - before)
    return Rounds(workers, skipped)


def _run_alone(specs: Sequence[WorkerSpec], settings: Settings) -> Rounds:
    """Run one worker after another. Each worker gets an equal share of the remaining time."""
    rounds = Rounds({}, {})
    for number, spec in enumerate(specs):
        now = time.monotonic()
        until = now + (settings.until - now) / (len(specs) - number)
        workers, skipped = run_rounds([spec], replace(settings, until=until))
        rounds.workers.update(workers)
        rounds.skipped.update(skipped)
    # A slow worker may have had time for fewer rounds than the others.
    count = min((len(x.samples) for x in rounds.workers.values() if x.samples), default=0)
    for worker in rounds.workers.values():
        del worker.samples[count:]
    return rounds


def _start_workers(
    specs: Sequence[WorkerSpec], stack: contextlib.ExitStack, skipped: dict[str, str]
) -> Iterator[WorkerProcess]:
    """Start workers and yield them. Closing the exit stack kills the workers."""
    for spec in specs:
        try:
            worker = stack.enter_context(WorkerProcess(spec))
        except WorkerFailedError as why:
            skipped[spec.name] = str(why)
        else:
            yield worker


class Quartiles(NamedTuple):
    """The median, and the first and third quartiles."""

    median: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles. For a single value, all three equal that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)
