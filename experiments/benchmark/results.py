"""Results: what a benchmark found, as JSON that keeps every sample, and as a table of ratios."""

import dataclasses
import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.benchmark.rounds import ROOT, Quartiles, Rounds, quartiles
from experiments.benchmark.worker import Sample
from transformer_jax.errors import DataError, StorageError, UsageError
from transformer_jax.runs.run_directory import installed_versions, write_json

FORMAT = 1
# In bytes: what is longer is none of ours, and is not read.
MAX_FILE = 64 << 20


@dataclass(frozen=True)
class Measurement:
    """What a contestant did."""

    first_seconds: float
    """The first call, compilation included."""
    facts: dict[str, Any]
    """Library, device, parameters, and what else its kind has."""
    samples: list[Sample]
    """One for each round."""
    second_start_seconds: float | None = None
    """The first call of another process, which found compiled programs in the cache."""

    @property
    def speeds(self) -> list[float]:
        """Units in a second, round by round."""
        return [sample.units / sample.seconds for sample in self.samples]

    @property
    def utilization(self) -> float | None:
        """Model FLOPs in a second over what the device could do: the median of rounds."""
        flops, peak = (self.facts.get(name) for name in ("flops_per_unit", "peak_flops"))
        if not flops or not peak:
            return None
        return quartiles(self.speeds).median * flops / peak


@dataclass(frozen=True)
class Benchmark:
    """Contestants that did the same work in the same rounds."""

    name: str
    unit: str
    """What speeds count: target tokens, or sentences."""
    work: dict[str, Any]
    """All that decides what was to be done."""
    measurements: dict[str, Measurement]
    reference: str | None = None
    """The contestant that others are compared with; None where no other took part."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contestants that took no part, and why."""
    notes: list[str] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """Return a contestant's speed over the reference's, round by round."""
        if self.reference is None:
            return []
        others = self.measurements[self.reference].speeds
        return [a / b for a, b in zip(self.measurements[name].speeds, others, strict=True)]

    def cpu_ratios(self, name: str) -> list[float]:
        """Return the same by the time of all threads, to which waiting does not add."""
        if self.reference is None:
            return []
        mine, others = (self.measurements[n].samples for n in (name, self.reference))
        return [
            (a.units / a.cpu_seconds) / (b.units / b.cpu_seconds)
            for a, b in zip(mine, others, strict=True)
            if a.cpu_seconds and b.cpu_seconds
        ]


@dataclass(frozen=True)
class Results:
    """Everything that one command found."""

    command: str
    benchmarks: list[Benchmark]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    """Of this project; "+" follows it where files differ from it."""
    date: str
    skipped: list[str] = field(default_factory=list)
    """Work that there was no time for."""

    @classmethod
    def collect(
        cls, command: str, parts: list[Benchmark], left_out: Sequence[str] = ()
    ) -> "Results":
        """Return results that say where and when they were found: here and now."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            command,
            parts,
            describe_machine(),
            installed_versions(),
            current_commit(),
            now,
            list(left_out),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data, ready for JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Results":
        """Return the results that `to_dict` described.

        Raises:
            KeyError, TypeError, ValueError: it did not.
        """
        content = dict(data)
        if content.pop("format") != FORMAT:
            raise ValueError(f"it is of another format than {FORMAT}")
        parts = [_part(part) for part in content.pop("benchmarks")]
        return cls(benchmarks=parts, **content)

    def store(self, folder: Path) -> Path:
        """Write the results as JSON, and their table beside it; return the JSON's path.

        Raises:
            StorageError: they cannot be written.
        """
        stamp = "".join(c for c in self.date.partition("+")[0] if c.isalnum())
        path = folder / f"{self.command}-{stamp}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, self.to_dict())
            path.with_suffix(".md").write_text(to_markdown(self), "utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error
        return path

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Read what `store` wrote.

        Raises:
            UsageError: there is no such file.
            DataError: it holds no results.
            StorageError: it cannot be read.
        """
        # Path's own raises where a name is too long to be one.
        if not os.path.isfile(path):  # noqa: PTH113
            raise UsageError(f"there is no file {path}")
        try:
            if path.stat().st_size > MAX_FILE:
                raise DataError(f"{path} holds no results: it has over {MAX_FILE >> 20} MiB")
            return cls.from_dict(json.loads(path.read_bytes()))
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{path} holds no results: {reason}") from error


def _part(data: Mapping[str, Any]) -> Benchmark:
    contestants = {str(name): _measured(one) for name, one in data["measurements"].items()}
    fields: dict[str, Any] = {**data, "measurements": contestants}
    part = Benchmark(**fields)
    if len({len(one.samples) for one in contestants.values()}) > 1:
        raise ValueError(f"contestants of {part.name} have not the same rounds")
    if part.reference is not None and part.reference not in contestants:
        raise ValueError(f"{part.name} has no contestant {part.reference!r}")
    return part


def _measured(data: Mapping[str, Any]) -> Measurement:
    samples = [Sample(**sample) for sample in data["samples"]]
    if not samples:
        raise ValueError("a contestant without samples")
    numbers = [x for sample in samples for x in (sample.seconds, sample.units, sample.peak_bytes)]
    second = data["second_start_seconds"]
    for number in (data["first_seconds"], *numbers, *([] if second is None else [second])):
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise ValueError(f"{number!r} is no positive number")
        if not math.isfinite(number):
            raise ValueError(f"{number!r} is no finite number")
    fields: dict[str, Any] = {**data, "samples": samples}
    return Measurement(**fields)


def summarize(
    rounds: Rounds,
    name: str,
    *,
    unit: str,
    work: Mapping[str, Any],
    references: Sequence[str] = (),
    flops: float | None = None,
    notes: Sequence[str] = (),
) -> Benchmark:
    """Return what rounds have found.

    Args:
        held: the rounds.
        name: what was done.
        unit: what speeds count.
        work: all that decides what was to be done.
        references: contestants that others may be compared with, the first that took part.
        flops: that a unit needs, by `training.flops`.
        remarks: what a reader must know.
    """
    contestants = {
        key: Measurement(
            entered.startup.first_seconds, entered.startup.facts, entered.process.samples
        )
        for key, entered in rounds.workers.items()
        if entered.process.samples
    }
    # Only JAX's process knows it; all work on the same device.
    peaks = [one.facts["peak_flops"] for one in contestants.values() if "peak_flops" in one.facts]
    for one in contestants.values():
        if flops and peaks:
            one.facts.update(flops_per_unit=flops, peak_flops=peaks[0])
    late = {key: "no time left for a round" for key in rounds.workers if key not in contestants}
    there = [key for key in references if key in contestants]
    return Benchmark(
        name,
        unit,
        dict(work),
        contestants,
        there[0] if there and len(contestants) > 1 else None,
        {**rounds.skipped, **late},
        list(notes),
    )


def describe_machine() -> dict[str, Any]:
    """Return what decides how fast this machine is, without its name."""
    processor = platform.processor()
    memory = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = models[0] if models else processor
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1)
    except (OSError, ValueError):
        # No Linux: the rest will do.
        pass
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": memory,
    }


def current_commit() -> str | None:
    """Return this project's commit; None where it is no clone, or there is no git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],  # noqa: S607
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


COLUMNS = (
    *("contestant", "speed, ratio", "middle half", "CPU ratio", "a second", "first call, s"),
    *("second start, s", "peak GiB", "utilization"),
)


def table_rows(part: Benchmark) -> list[list[str]]:
    """Return a line of cells for each contestant."""
    lines = list[list[str]]()
    for name, measured in part.measurements.items():
        ratios, cpu = part.ratios(name), part.cpu_ratios(name)
        second, used = measured.second_start_seconds, measured.utilization
        lines.append(
            [
                name,
                f"{quartiles(ratios).median:.2f}" if ratios else "",
                format_quartiles(quartiles(ratios)) if ratios else "",
                f"{quartiles(cpu).median:.2f}" if cpu else "",
                f"{quartiles(measured.speeds).median:,.1f}",
                f"{measured.first_seconds:.1f}",
                "" if second is None else f"{second:.1f}",
                f"{max(sample.peak_bytes for sample in measured.samples) / (1 << 30):.2f}",
                "" if used is None else f"{used:.1%}",
            ]
        )
    return lines


def format_quartiles(found: Quartiles) -> str:
    """Return the quartiles as text."""
    return f"{found.low:.2f} - {found.high:.2f}"


def to_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned."""
    every = [head, *lines]
    widths = [max(len(line[i]) for line in every) for i in range(len(head))]

    def row(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    return "\n".join([row(head), row(rule), *map(row, lines)])


def to_markdown(results: Results) -> str:
    """Return all there is to say, tables and what a reader must know."""
    said = [f"# {results.command}"]
    for part in results.benchmarks:
        said += [f"## {part.name}", to_table(COLUMNS, table_rows(part))]
        counts = {len(one.samples) for one in part.measurements.values()}
        told = [f"medians of {max(counts, default=0)} rounds; a second: {part.unit}"]
        if part.reference is not None:
            told.append(f"ratios are to {part.reference}, above 1 is faster")
        told += [f"{name}: {_facts(one)}" for name, one in part.measurements.items()]
        told += [f"left out: {name}: {why}" for name, why in part.skipped.items()]
        told.append("work: " + ", ".join(f"{k} {v}" for k, v in part.work.items()))
        said.append("\n".join(f"- {line}" for line in [*told, *part.notes]))
    said += [f"Left out: {what}." for what in results.skipped]
    where = ", ".join(f"{v} {k}" if k == "cores" else f"{v}" for k, v in results.machine.items())
    said.append(f"{results.date}, commit {results.commit or 'unknown'}; {where} GiB.")
    return "\n\n".join(said) + "\n"


def _facts(measured: Measurement) -> str:
    """Return a contestant's library, device and values, in one line."""
    facts = measured.facts
    told = [str(facts[key]) for key in ("library", "device") if key in facts]
    if "parameters" in facts:
        told.append(f"{facts['parameters']:,} parameters")
    if "compile_seconds" in facts:
        told.append(f"{facts['compile_seconds']:.1f} s of the first call compiled")
    return f"{', '.join(told)}; last value {measured.samples[-1].value:.4g}"
