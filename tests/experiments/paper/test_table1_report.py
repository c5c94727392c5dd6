"""Test the table that the command prints and writes."""

import json
from pathlib import Path

import pytest

from experiments.paper.__main__ import main
from experiments.paper.layers import LAYERS


@pytest.mark.slow
def test_a_repeated_length_or_width_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    repeated = ["--lengths", "16", "16", "--widths", "8", "8", "--exact"]
    assert main(["table1", *repeated]) == 0
    output = capsys.readouterr().out
    assert main(["table1", "--lengths", "16", "--widths", "8", "--exact"]) == 0
    assert capsys.readouterr().out == output
    assert "O(log_k(n)) is the path length of dilated convolutions" in " ".join(output.split())


@pytest.mark.slow
def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lengths", "8", "16", "--widths", "8", "--out", str(tmp_path / "out")]
    assert main(["table1", *options]) == 0
    output = capsys.readouterr().out
    assert "n^" in output
    assert "Time and memory" in output
    result = json.loads((tmp_path / "out/table.json").read_text("utf-8"))
    assert result["command"] == "python -m experiments.paper table1 --lengths 8 16 --widths 8"
    assert len(result["measurements"]) == 2 * len(LAYERS)
    assert all(m["seconds"] > 0 and m["bytes"] > 0 for m in result["measurements"])
    page = (tmp_path / "out/table.md").read_text("utf-8")
    assert all(name in page for name in LAYERS)
