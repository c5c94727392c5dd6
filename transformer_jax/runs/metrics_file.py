"""The metrics.jsonl file, in which each line is a report of metrics in JSON."""

import contextlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeGuard

from transformer_jax.errors import StorageError, storage_errors
from transformer_jax.files import MAX_METRICS_BYTES, JsonObject, check_regular, write_text

# The maximum length of a report, in bytes. Longer lines are invalid.
MAX_LINE = 1 << 20
# The largest integer that a NumPy array can hold.
MAX_COUNT = 2**63 - 1


def read_metrics(path: Path, max_bytes: int = MAX_METRICS_BYTES) -> list[JsonObject]:
    """Return the valid reports in the last `max_bytes` bytes of a metrics.jsonl file.

    The step of each report is a nonnegative integer; the other values can have any type. Return an
    empty list if the file cannot be read.
    """
    reports = []
    with contextlib.suppress(OSError, StorageError):
        size = check_regular(path).st_size
        with path.open("rb") as file:
            file.seek(max(0, size - max_bytes))
            lines = file.read(max_bytes).splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                report = json.loads(line)
                if isinstance(report, dict) and is_count(report.get("step")):
                    reports.append(report)
    return reports


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is a nonnegative integer that a NumPy array can hold."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that `float` can represent."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is float


def truncate_metrics(path: Path, step: int, splits: Collection[str]) -> None:
    """Remove the reports that become stale when a run resumes at `step`.

    Reports for later steps are stale, because the resumed run writes them again. `splits` contains
    the splits for which a report at `step` was scheduled. Other reports at `step` are stale,
    because an unscheduled report is valid only until the run is extended. This function also
    removes invalid lines at the end of the file, because a power failure can leave a partial line
    or null bytes there.

    Raises:
        StorageError: the file cannot be accessed, or it contains an invalid line before a valid
            report whose step is at most `step`.
    """
    with storage_errors(f"{path} cannot be truncated"):
        if not path.exists():
            return
        reports: list[str] = []
        first_bad = 0
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE), b"")
            for number, line in enumerate(lines, start=1):
                report = _parse_report(line)
                if report is None:
                    first_bad = first_bad or number
                elif first_bad and report[0] <= step:
                    raise StorageError(
                        f"{path} line {first_bad} is not a report: remove the line to resume"
                    )
                elif report[0] < step or (report[0] == step and report[1] in splits):
                    reports.append(line.decode())
        write_text(path, "".join(reports))


def _parse_report(line: bytes) -> tuple[int, Literal["train", "dev"]] | None:
    try:
        report = json.loads(line.decode())
        step, split = report["step"], report["split"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_report = type(step) is int and split in ("train", "dev") and line.endswith(b"\n")
    return (step, split) if is_report else None
