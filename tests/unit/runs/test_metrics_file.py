import json
import warnings
from pathlib import Path

import pytest

from transformer_jax.errors import StorageError
from transformer_jax.progress import Note
from transformer_jax.runs.metrics_file import (
    MAX_LINE,
    format_report,
    read_metrics,
    truncate_metrics,
)

BOTH_SPLITS = {"train", "dev"}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_reports_of_later_steps_and_an_incomplete_line_are_removed(metrics: Path) -> None:
    reports = [{"step": step, "split": "train", "loss": 0.5} for step in (10, 20, 20)]
    lines = [json.dumps(line) + "\n" for line in [*reports, {"step": 30, "split": "dev"}]]
    metrics.write_text("".join(lines) + '{"step": 1', "utf-8")
    truncate_metrics(metrics, 20, BOTH_SPLITS)
    text = metrics.read_text("utf-8")
    assert text.endswith("\n")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == reports
    truncate_metrics(metrics, 0, BOTH_SPLITS)
    assert metrics.read_text("utf-8") == ""
    assert list(metrics.parent.iterdir()) == [metrics]


def test_unscheduled_reports_of_the_last_step_are_removed(metrics: Path) -> None:
    reports = [{"step": step, "split": split} for step in (4, 6) for split in ("train", "dev")]
    metrics.write_text("".join(json.dumps(report) + "\n" for report in reports), "utf-8")
    # Training ended at step 6. At this step, a train report was scheduled, but a dev report was
    # not.
    truncate_metrics(metrics, 6, {"train"})
    lines = metrics.read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == reports[:3]


# A power failure or an attacker could produce these invalid lines.
INVALID_LINES = {
    "zeros": bytes(64) + b"\n",
    "zeros without a newline": bytes(64),
    "half a line, then zeros": b'{"step": 20, "spl' + bytes(64) + b"\n\n",
    "a long line": b"0" * (MAX_LINE + 9) + b"\n",
    "invalid UTF-8": b'{"step": 20, "\xff": 1}\n',
    "deep nesting": b"[" * 10**5 + b"\n",
    "a list": b"[20]\n",
    "no step": b"{}\n",
    "infinite step": b'{"step": -Infinity, "split": "dev"}\n',
    "no split": b'{"step": 20}\n',
}


@pytest.mark.parametrize("name", INVALID_LINES)
def test_an_invalid_line_is_removed_at_the_end_and_an_error_before_a_report(
    name: str, metrics: Path
) -> None:
    ten, twenty, thirty = (b'{"step": %d, "split": "dev"}\n' % step for step in (10, 20, 30))
    for later in (b"", thirty):
        metrics.write_bytes(ten + twenty + INVALID_LINES[name] + later)
        truncate_metrics(metrics, 20, BOTH_SPLITS)
        assert metrics.read_bytes() == ten + twenty
    if name != "zeros without a newline":
        before = ten + INVALID_LINES[name] + twenty
        metrics.write_bytes(before)
        with pytest.raises(StorageError, match=r"metrics.jsonl line 2 is not a report, or"):
            truncate_metrics(metrics, 20, BOTH_SPLITS)
        assert metrics.read_bytes() == before


def test_an_altered_last_line_is_an_error_and_is_kept(metrics: Path) -> None:
    reports = [{"step": step, "split": "dev", "loss": 2.5} for step in (10, 20)]
    lines = "".join(format_report(report) for report in reports).replace(
        '20, "split": "dev", "loss": 2.5', '20, "split": "dev", "loss": 2.6'
    )
    metrics.write_text(lines, "utf-8")
    with pytest.raises(StorageError, match=r"metrics.jsonl line 2 is not a report, or differs"):
        truncate_metrics(metrics, 20, BOTH_SPLITS)
    assert metrics.read_text("utf-8") == lines


def test_a_run_without_reports_stays_without_reports(metrics: Path) -> None:
    truncate_metrics(metrics, 3, BOTH_SPLITS)
    assert not metrics.exists()


def test_a_flipped_bit_or_swapped_lines_are_noticed(metrics: Path) -> None:
    reports = [{"step": 10 * i, "split": "train", "loss": i / 7} for i in range(1, 4)]
    lines = [format_report(report).encode() for report in reports]
    metrics.write_bytes(b"".join(lines))
    assert read_metrics(metrics) == reports
    swapped = [lines[i] for i in (1, 0, 2)]
    # The newline of the last line is also missing while a program is writing the line.
    flips = [(i, bit) for i in range(len(lines[1])) for bit in range(8)]
    flipped = [
        [lines[0], lines[1][:i] + bytes([lines[1][i] ^ 1 << bit]) + lines[1][i + 1 :], lines[2]]
        for i, bit in flips
    ]
    noticed = 0
    for damaged in (swapped, *flipped):
        metrics.write_bytes(b"".join(damaged))
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            found = read_metrics(metrics)
        if not notes:
            # A flipped bit in the name of the CRC does not matter.
            assert [{k: x for k, x in report.items() if k in reports[0]} for report in found] == (
                reports
            )
            continue
        noticed += 1
        assert [note.category for note in notes] == [Note]
        assert all(report in reports for report in found)
        if len(metrics.read_bytes().splitlines()) >= len(lines):
            with pytest.raises(StorageError, match=r"line [12] is not a report, or differs from"):
                truncate_metrics(metrics, 30, BOTH_SPLITS)
    assert noticed > 0.9 * len(flips)


def test_a_file_that_cannot_be_read_is_noted(metrics: Path) -> None:
    metrics.symlink_to(metrics.name)
    with pytest.warns(Note, match=r"\.jsonl cannot be read: Too many .*; it is ignored"):
        assert read_metrics(metrics) == []
    metrics.unlink()
    metrics.mkdir()
    with pytest.warns(Note, match=r"\.jsonl is not a regular file; it is ignored"):
        assert read_metrics(metrics) == []


def test_a_line_without_its_crc_can_be_edited(metrics: Path) -> None:
    line = format_report({"step": 3, "split": "dev", "perplexity": 5.0})
    metrics.write_text(line, "utf-8")
    assert read_metrics(metrics)
    edited = line.replace("5.0", "6.0")
    metrics.write_text(edited, "utf-8")
    with pytest.warns(Note, match="metrics.jsonl: damaged lines, which are ignored: 1"):
        assert read_metrics(metrics) == []
    metrics.write_text(edited[: edited.index(', "crc32"')] + "}\n", "utf-8")
    assert read_metrics(metrics) == [{"step": 3, "split": "dev", "perplexity": 6.0}]
