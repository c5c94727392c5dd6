"""A contestant: a process of its own that sets itself up, and then works whenever it is asked to.

It is told its task in a line of JSON on standard input, and answers with one when it is ready;
from then on a line with a number asks for so many steps, and a line with a sample answers. This
module needs nothing but Python, for a contestant may live in an environment of its own.
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
    """What a turn did."""

    units: float
    """Target tokens, or sentences."""
    value: float
    """A number that shows that it did the work: the loss, or the mean length of translations."""


@dataclass(frozen=True)
class Workload:
    """What a contestant does once it is set up."""

    run: Callable[[int], RunResult]
    """Do so many steps, and wait for them."""
    cycle: int = 1
    """Steps after which everything was done once: so many make the first call."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is to be known of it beside its times; read after the first call."""
    peak_bytes: Callable[[], int] = lambda: resident_bytes()
    """The most memory that it held so far."""


@dataclass(frozen=True)
class Sample:
    """What one turn took."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process: beside other work it tells more than the clock."""
    units: float
    value: float
    peak_bytes: int


@dataclass(frozen=True)
class Startup:
    """What a contestant says when it can begin."""

    setup_seconds: float
    first_seconds: float
    """The first call, compilation included."""
    facts: dict[str, Any]


def resident_bytes() -> int:
    """Return the most main memory that this process has held."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        # Elsewhere than on Linux; macOS counts bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def take_sample(entrant: Workload, steps: int) -> Sample:
    """Do a turn, and time it."""
    cpu, wall = time.process_time(), time.perf_counter()
    done = entrant.run(steps)
    seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(seconds, cpu, done.units, done.value, entrant.peak_bytes())


def serve(requests: TextIO, answers: TextIO) -> None:
    """Be the contestant that the first request describes, until there are no more."""

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    task = json.loads(requests.readline())
    began = time.perf_counter()
    try:
        module, _, name = task["maker"].partition(".")
        make = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        entrant = make(task)
        setup = time.perf_counter() - began
        began = time.perf_counter()
        entrant.turn(entrant.cycle)
        answer(asdict(Startup(setup, time.perf_counter() - began, entrant.facts)))
        for line in requests:
            answer(asdict(take_sample(entrant, int(line))))
    # Whatever it is, the others go on without this one.
    except Exception as error:  # noqa: BLE001
        answer({"left_out": " ".join(f"{type(error).__name__}: {error}".split())[:200]})


def main() -> None:
    """Serve whoever started this process."""
    # Whatever libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
