"""The metrics.jsonl file, in which each line is a report of metrics in JSON.

The last field of a report is a CRC of its other fields. A report without a CRC is accepted, so that
a person can edit it. The steps of the reports on each split do not decrease.
"""

import contextlib
import json
import sys
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TypeGuard

from transformer_jax.errors import StorageError, storage_errors
from transformer_jax.files import MAX_METRICS_BYTES, JsonObject, check_regular, write_text
from transformer_jax.progress import note
from transformer_jax.runs.checkpoint_metadata import count_expected_reports

# The maximum length of a report, in bytes. Longer lines are invalid.
MAX_LINE = 1 << 20
# The largest integer that a NumPy array can hold.
MAX_COUNT = 2**63 - 1
CRC = "crc32"


def read_metrics(path: Path, max_bytes: int = MAX_METRICS_BYTES) -> list[JsonObject]:
    """Return the valid reports in the last `max_bytes` bytes of a metrics.jsonl file, if any.

    Each step is a nonnegative integer; the other values can have any type. Issue a note if reports
    are missing or a line is invalid. Ignore a partial line at the start or end.
    """
    reports: list[JsonObject] = []
    # Read this number first, because training may write more reports in the meantime.
    num_expected, size = count_expected_reports(path.parent), 0
    lines: list[bytes] = []
    try:
        size = check_regular(path).st_size
        with path.open("rb") as file:
            file.seek(max(0, size - max_bytes))
            lines = file.read(max_bytes).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except StorageError as error:
        note(f"{error}; it is ignored")
    except OSError as error:
        note(f"{path} cannot be read: {error.strerror}; it is ignored")
    num_damaged, latest = 0, dict[str, int]()
    for number, line in enumerate(lines):
        report = parse_report(line)
        if report is None or _is_out_of_order(report, latest):
            is_part = (number == 0 and size > max_bytes) or not line.endswith(b"\n")
            num_damaged += not is_part
        else:
            reports.append(report)
    if num_damaged:
        note(f"{path}: damaged lines, which are ignored: {num_damaged}")
    if size <= max_bytes:
        _check_number(path, len(reports), num_expected)
    return reports


def _check_number(path: Path, number: int, num_expected: int) -> None:
    if number < num_expected:
        note(f"{path} has {number} of {num_expected} reports: the others are missing")


def _is_out_of_order(report: JsonObject, latest: dict[str, int]) -> bool:
    """Return whether a report's step precedes that of its split in `latest`, or update `latest`."""
    split, step = str(report.get("split")), report["step"]
    if step < latest.get(split, 0):
        return True
    latest[split] = step
    return False


def format_report(report: JsonObject) -> str:
    """Return a report as a line."""
    text = json.dumps(report)
    return f'{text[:-1]}, "{CRC}": "{zlib.crc32(text.encode()):08x}"}}\n'


def parse_report(line: bytes) -> JsonObject | None:
    """Return the report in a line, without its CRC, or None if the line is not a valid report."""
    with contextlib.suppress(ValueError, RecursionError):
        report = json.loads(line.decode())
        if isinstance(report, dict) and is_count(report.get("step")):
            crc = report.pop(CRC, None)
            is_intact = crc == f"{zlib.crc32(json.dumps(report).encode()):08x}"
            return report if is_intact or CRC.encode() not in line else None
    return None


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is a nonnegative integer that a NumPy array can hold."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that `float` can represent."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is float


def _is_complete(line: bytes) -> bool:
    """Return whether a line is JSON with a CRC, even if the CRC is wrong."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return line.endswith(b"\n") and CRC in json.loads(line.decode())
    return False


def _damaged(path: Path, number: int) -> StorageError:
    return StorageError(
        f"{path} line {number} is not a report, or differs from what was written: remove the line "
        "to resume"
    )


def truncate_metrics(path: Path, step: int, splits: Collection[str]) -> None:
    """Remove the reports that become stale when a run resumes at `step`.

    These are the reports for later steps, and the reports for this step on any split that is not in
    `splits`. The reports on `splits` are final. Also remove invalid lines at the end, which a power
    failure can leave.

    Raise a StorageError if an invalid line precedes a valid one, or a complete line was altered.
    """
    with storage_errors(f"{path} cannot be truncated"):
        if not path.exists():
            _check_number(path, 0, count_expected_reports(path.parent))
            return
        reports: list[str] = []
        first_bad, latest, is_altered = 0, dict[str, int](), False
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE), b"")
            for number, line in enumerate(lines, start=1):
                report = parse_report(line) if line.endswith(b"\n") else None
                split = None if report is None else report.get("split")
                if (
                    report is None
                    or split not in ("train", "dev")
                    or _is_out_of_order(report, latest)
                ):
                    first_bad = first_bad or number
                    # A power failure does not leave a complete line.
                    is_altered = is_altered or _is_complete(line)
                elif first_bad and report["step"] <= step:
                    raise _damaged(path, first_bad)
                elif report["step"] < step or (report["step"] == step and split in splits):
                    reports.append(line.decode())
        if is_altered:
            raise _damaged(path, first_bad)
        _check_number(path, len(reports), count_expected_reports(path.parent))
        write_text(path, "".join(reports))
