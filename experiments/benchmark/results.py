"""Store benchmark results as JSON with every sample, and as a table of ratios."""

import dataclasses
import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.benchmark.measurements import Benchmark, Measurement, read_benchmark
from experiments.benchmark.rounds import Quartiles, quartiles
from transformer_jax.errors import DataError, UsageError, storage_errors
from transformer_jax.files import is_file, write_text
from transformer_jax.reports import tables
from transformer_jax.runs.versions import installed_versions, source_commit

# Library names for reports, keyed by Python package.
LIBRARIES = {
    "jax": "JAX",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "ctranslate2": "CTranslate2",
}
FORMAT = 2
# The maximum size of a result file, in bytes.
MAX_FILE = 64 << 20


@dataclass(frozen=True)
class Results:
    """All results of one benchmark command."""

    command: str
    benchmarks: list[Benchmark]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    """This project's commit, followed by "+" if there are uncommitted changes; None if unknown."""
    date: str
    skipped: list[str] = field(default_factory=list)
    """The benchmarks that were skipped or that failed, with the reasons."""

    @classmethod
    def collect(cls, command: str, benchmarks: list[Benchmark]) -> "Results":
        """Return results that record the current machine, package versions, commit, and time."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            command,
            benchmarks,
            describe_machine(),
            installed_versions(),
            source_commit() or None,
            now,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON data."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Results":
        """Reconstruct the results from the output of `to_dict`.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the data is not in the expected format.
        """
        content = dict(data)
        if content.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        benchmarks = [read_benchmark(part) for part in content.pop("benchmarks")]
        return cls(benchmarks=benchmarks, **content)

    def store(self, folder: Path) -> Path:
        """Write the results as JSON and as a Markdown report; return the path to the JSON file.

        Raises:
            StorageError: the files cannot be written.
        """
        stamp = "".join(c for c in self.date.partition("+")[0] if c.isalnum())
        path = folder / f"{self.command}-{stamp}.json"
        with storage_errors(f"{path} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
            path.with_suffix(".md").write_text(to_markdown(self), "utf-8")
        return path

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Read a file that `store` wrote.

        Raises:
            UsageError: the file does not exist.
            DataError: the file does not contain results.
            StorageError: the file cannot be read.
        """
        if not is_file(path):
            raise UsageError(f"no such file: {path}")
        with storage_errors(f"{path} cannot be read"):
            if path.stat().st_size > MAX_FILE:
                raise DataError(
                    f"{path} is not a result file: it has more than {MAX_FILE >> 20} MiB"
                )
            content = path.read_bytes()
        try:
            return cls.from_dict(json.loads(content))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{path} is not a result file: {reason}") from error


def describe_machine() -> dict[str, Any]:
    """Return this machine's system, processor, number of cores, and memory, but not its name."""
    processor = platform.processor()
    memory = None
    try:
        first_core = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        details = dict(re.findall(r"^(.+?)\s*: (.+)$", first_core, re.MULTILINE))
        processor = details.get("model name", processor)
        if {"cpu family", "model"} <= details.keys():
            # The names of some virtual CPUs do not include the generation.
            processor += f" (family {details['cpu family']}, model {details['model']})"
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1)
    except (OSError, ValueError):
        # Systems other than Linux may lack this file or these settings, so report only the other
        # details.
        pass
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": memory,
    }


COLUMNS = (
    *("worker", "speed ratio", "middle half", "CPU ratio", "per second", "first call, s"),
    *("second start, s", "peak GiB", "utilization"),
)


def table_rows(part: Benchmark) -> list[list[str]]:
    """Return one table row per worker."""
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


def format_quartiles(values: Quartiles) -> str:
    """Return the quartiles as text."""
    return f"{values.low:.2f} - {values.high:.2f}"


def to_markdown(results: Results) -> str:
    """Return a Markdown report with tables and notes."""
    sections = [f"# {results.command}"]
    for part in results.benchmarks:
        table = tables.to_markdown([COLUMNS, *table_rows(part)], align=True)
        sections += [f"## {part.name}", table]
        counts = {len(one.samples) for one in part.measurements.values()}
        rounds = max(counts, default=0)
        notes = [
            f"Ratios and speeds are medians over {rounds} rounds. "
            f"Speeds are in {part.unit} per second."
        ]
        if part.reference is not None:
            notes.append(f"Ratios are relative to {part.reference}; above 1 is faster.")
        notes += [_describe(name, one, part.unit) for name, one in part.measurements.items()]
        notes += [f"The worker {name} was skipped: {why}." for name, why in part.skipped.items()]
        notes.append(f"Settings: {', '.join(f'{k} {v}' for k, v in part.work.items())}.")
        sections.append("\n".join(f"- {line}" for line in [*notes, *part.notes]))
    sections += [f"Skipped: {what}." for what in results.skipped]
    units = {"cores": " cores", "memory_gib": " GiB"}
    known = {key: value for key, value in results.machine.items() if value is not None}
    where = ", ".join(f"{value}{units.get(key, '')}" for key, value in known.items())
    sections.append(
        f"These results are from {results.date}, commit {results.commit or 'unknown'}, on {where}."
    )
    return "\n\n".join(sections) + "\n"


def _describe(name: str, measured: Measurement, unit: str) -> str:
    """Describe a worker's library, device, and results in two sentences."""
    facts = measured.facts
    library = str(facts.get("library")).replace(", ", " with ")
    for package, title in LIBRARIES.items():
        library = library.replace(f"{package} ", f"{title} ")
    kind, _, count = str(facts.get("device")).replace("cpu", "CPU").partition(" x ")
    device = f"{count} x {kind}" if count not in ("", "1") else f"one {kind}"
    claims = list[str]()
    if "parameters" in facts:
        claims.append(f"has {facts['parameters']:,} parameters")
    if "compile_seconds" in facts:
        claims.append(f"compiled in {facts['compile_seconds']:.1f} s")
    value = "a final loss" if unit == "target tokens" else "a mean translation length (with EOS)"
    claims.append(f"had {value} of {measured.samples[-1].value:.4g}")
    listed = (
        " and ".join(claims) if len(claims) < 3 else f"{', '.join(claims[:-1])}, and {claims[-1]}"
    )
    return f"`{name}` ran {library} on {device}. It {listed}."
