"""Test the mistakes that the commands `status` and `report` recognize."""

from pathlib import Path

import pytest
from example_configs import SMALL
from processes import mistake
from run_files import make_finished_sweep, make_run

from transformer_jax.cli import main


def test_a_report_of_runs_needs_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", SMALL, 5.0)
    error = mistake(capsys, ["report", str(run)])
    assert "a report of runs needs a folder: --out FOLDER" in error


def test_a_report_of_a_sweep_is_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_finished_sweep(tmp_path / "sweep", rows=("base",))
    error = mistake(capsys, ["report", str(sweep.path), "--out", str(tmp_path / "out")])
    assert "a sweep's report is written to the sweep's folder" in error
    assert main(["report", str(sweep.path)]) == 0
    assert f"written to {sweep.path / 'report'}" in capsys.readouterr().out


def test_the_status_of_a_folder_without_a_plan_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a sweep: it has no sweep.json" in mistake(capsys, ["status", str(tmp_path)])
