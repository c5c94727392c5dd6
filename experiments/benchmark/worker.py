"""A worker process that prepares one workload and runs it on demand.

The worker reads its task as one line of JSON from standard input and writes one line to standard
output when it is ready. After that, each input line specifies the number of steps to run, and each
output line contains the resulting `Sample`. This module imports only the standard library, because
a worker may run in a different environment.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

PACKAGE = "experiments.benchmark"


@dataclass(frozen=True)
class RunResult:
    """The result of running a given number of steps."""

    units: float
    """The number of target tokens or sentences that were processed."""
    value: float
    """A value for sanity checks: the loss or the mean translation length."""


@dataclass(frozen=True)
class Workload:
    """Benchmark work that is ready to run."""

    run: Callable[[int], RunResult]
    """A function that runs the given number of steps and waits until they finish."""
    cycle: int = 1
    """The number of steps after which every batch shape has occurred. The first call to `run`
    executes this many steps."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Details to report along with the times. The worker reads these details after the first call
    to `run`."""
    peak_bytes: Callable[[], int] = lambda: resident_bytes()
    """A function that returns the peak memory usage so far, in bytes."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one call to `Workload.run`."""

    seconds: float
    cpu_seconds: float
    """The CPU time of all threads, which is less sensitive to other load on the machine than wall
    time is."""
    units: float
    value: float
    peak_bytes: int


@dataclass(frozen=True)
class Startup:
    """The message that a worker sends when it is ready."""

    first_seconds: float
    """The duration of the first call to `Workload.run`, including compilation."""
    facts: dict[str, Any]


def resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        # On systems other than Linux, use `ru_maxrss`, which is in bytes on macOS and in KiB
        # elsewhere.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def take_sample(workload: Workload, steps: int) -> Sample:
    """Run the given number of steps, and measure the time and memory that they use."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = workload.run(steps)
    seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(seconds, cpu, result.units, result.value, workload.peak_bytes())


def serve(requests: TextIO, answers: TextIO) -> None:
    """Prepare the workload that the first request describes, and then handle the others."""

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    task = json.loads(requests.readline())
    try:
        module, _, name = task["maker"].partition(".")
        make = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        workload = make(task)
        start = time.perf_counter()
        workload.run(workload.cycle)
        answer(asdict(Startup(time.perf_counter() - start, workload.facts)))
        for line in requests:
            answer(asdict(take_sample(workload, int(line))))
    # Report any failure to the parent process, which then continues with the other workers.
    except Exception as error:  # noqa: BLE001
        answer({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]})


def main() -> None:
    """Handle requests from the parent process."""
    # Replies go to standard output, so redirect the output of libraries to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
