"""Test that reports collect the results of runs that are not part of a sweep."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from example_configs import FILES, SMALL
from run_files import collect, make_finished_sweep, make_run, write_results, write_untrained_run

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.config.architectures import unused_defaults
from transformer_jax.reports.collect import collect_runs, read_adhoc_status
from transformer_jax.reports.report import write_report
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sharing.packaging import package_run
from transformer_jax.sweeps.plan import SweepRun


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three runs that form two rows. The first row has two seeds."""
    return [
        make_run(tmp_path / "narrow", SMALL, 5.0),
        make_run(tmp_path / "wide", SMALL.change(model={"d_ff": 48}), 4.0),
        make_run(tmp_path / "narrow-again", SMALL.change(train={"seed": 7}), 5.5),
    ]


def test_runs_that_differ_only_in_their_seed_form_one_row(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["report", *map(str, runs), "--out", str(out)]
    assert main(command) == 0
    assert "paper BLEU" not in (out / "report" / "table.md").read_text()
    with (out / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["seeds"], row["change"]) for row in rows] == [
        ("narrow", "2", "narrow"),
        ("wide", "1", "d_ff 48"),
    ]
    assert rows[0]["dev perplexity"] == "5.25 ± 0.35"
    printed = capsys.readouterr().out
    assert "A difference without an interval proves nothing." in printed
    assert f"Reported by: transformer-jax {' '.join(command)}" in printed
    # The command may overwrite its own report. The new report lists a run that has no scores.
    shutil.rmtree(runs[1] / "evaluations")
    assert main(command) == 0
    assert "not scored: transformer-jax evaluate" in capsys.readouterr().out
    for run in runs:
        shutil.rmtree(run / "evaluations", ignore_errors=True)
    assert main(command) == 2
    reason = f"{runs[0]} is not scored: transformer-jax evaluate {runs[0]} --split dev"
    assert reason in capsys.readouterr().err


def test_fields_that_an_architecture_does_not_use_are_not_among_the_changes(tmp_path: Path) -> None:
    conv = SMALL.change(model={**unused_defaults("conv"), "architecture": "conv"})
    assert {("model", "d_k"), ("model", "d_ff")} <= SMALL.differences(conv).keys()
    runs = [make_run(tmp_path / "base", SMALL, 5.0), make_run(tmp_path / "conv", conv, 4.0)]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "report" / "table.csv").open() as file:
        assert [row["change"] for row in csv.DictReader(file)] == ["base", "architecture conv"]


def test_a_path_that_is_not_utf_8_can_be_reported(tmp_path: Path) -> None:
    # `train` rejects a path that is not UTF-8, but a user may rename a run's folder.
    run = make_run(tmp_path / "run", perplexity=5.0).rename(tmp_path / os.fsdecode(b"\xff"))
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "| ? |" in (tmp_path / "out" / "report" / "table.md").read_text("utf-8")


def test_runs_that_cannot_be_compared_are_rejected_in_one_line(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*arguments: str | Path, code: int = 2) -> str:
        assert main(["report", *map(str, arguments)]) == code
        [line] = capsys.readouterr().err.splitlines()
        return line

    out = tmp_path / "out"
    (tmp_path / "mine").mkdir()
    line = error_of(*runs, "--out", tmp_path / "mine", code=74)
    assert "exists but does not contain a report: choose another folder (--out FOLDER)" in line
    # A report of runs must not replace the report of a sweep.
    sweep = make_finished_sweep(tmp_path / "sweep", rows=["base"], splits=["dev"])
    write_report(collect(sweep))
    line = error_of(*runs, "--out", sweep.path, code=74)
    assert "is a sweep: choose another folder (--out FOLDER)" in line
    assert "a report of runs needs a folder: --out FOLDER" in error_of(*runs)
    assert "report needs a sweep, or runs" in error_of("--out", out)
    assert "a run is listed twice" in error_of(runs[0], runs[0], "--out", out)
    error_of(runs[0], tmp_path, "--out", out)
    shutil.copytree(runs[0], tmp_path / "copy")
    line = error_of(*runs, tmp_path / "copy", "--out", out)
    assert "has the same config and seed as another run" in line
    other = make_run(tmp_path / "other", SMALL.change(data={"train": FILES["dev"]}))
    assert "were trained on different text" in error_of(runs[0], other, "--out", out)
    assert not out.exists()


def test_the_note_on_the_search_describes_the_search_of_the_scores(
    runs: list[Path], tmp_path: Path
) -> None:
    for run in runs:
        [path] = run.glob("evaluations/*/scores.json")
        scores = json.loads(path.read_text())
        scores["decode"]["beam_size"] = 1
        path.write_text(json.dumps(scores | {"average_checkpoints": 3}))
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    notes = (tmp_path / "out" / "report" / "table.md").read_text().replace("\\", "")
    assert "- Search: beam_size 1, length_penalty gnmt" in notes
    assert "average_checkpoints 3." in notes


def test_rows_of_folders_with_the_same_name_have_different_names(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / parent / "demo", SMALL.change(model={"d_ff": 32 + number}))
        for number, parent in enumerate("abc")
    ]
    sweep = collect_runs(paths, tmp_path / "out")
    assert len(sweep.rows) == 3
    assert [run.path for run in sweep.runs] == paths


def test_rows_are_named_after_the_rows_of_a_sweep_and_not_after_its_seeds(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / row / "seed-0", SMALL.change(model={"d_ff": d_ff}))
        for row, d_ff in (("base", 32), ("C6", 48))
    ]
    assert list(collect_runs(paths, tmp_path / "out").rows) == ["base", "C6"]


def test_a_run_with_scores_counts_as_done(runs: list[Path], tmp_path: Path) -> None:
    [run] = collect_runs(runs[:1], tmp_path / "out").runs
    assert (read_adhoc_status(run).status, read_adhoc_status(run).note) == ("done", "")
    (run.path / "metrics.jsonl").write_text('{"split": "train", "step": 4}\n')
    assert read_adhoc_status(run).note == "has finished 4 of 8 steps"


def test_runs_that_were_scored_only_on_the_test_set_are_compared(
    runs: list[Path], tmp_path: Path
) -> None:
    for run in runs:
        shutil.rmtree(run / "evaluations")
        config = RunFolder.open(run).config
        planned = SweepRun(run, run.name, run.name, config.train.seed, config)
        write_results(planned, 5.0 + len(run.name), 5, splits=["test"])
    out = tmp_path / "out"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    text = (out / "report" / "table.md").read_text()
    assert "These answers use the test set.\n" in text
    assert "Missing" not in text
    with (out / "report" / "table.csv").open() as file:
        assert [row["seeds"] for row in csv.DictReader(file)] == ["2", "1"]


def test_a_package_has_the_step_of_its_parameters(tmp_path: Path) -> None:
    run = transformer_jax.load(write_untrained_run(tmp_path / "run").path)
    package = package_run(run, tmp_path / "package").path
    scored = make_run(tmp_path / "scored", perplexity=5.0)
    shutil.copytree(scored / "evaluations", package / "evaluations")
    [planned] = collect_runs([package], tmp_path / "out").runs
    status = read_adhoc_status(planned)
    assert (status.step, status.status, status.note) == (8, "done", "")


def test_a_note_states_that_the_scores_are_those_of_an_earlier_step(
    runs: list[Path], tmp_path: Path
) -> None:
    [run] = collect_runs(runs[:1], tmp_path / "out").runs
    (run.path / "metrics.jsonl").write_text('{"split": "train", "step": 8}\n')
    [file] = run.path.glob("evaluations/dev-*/scores.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 4}))
    assert read_adhoc_status(run).note == "was scored on dev at step 4 of 8"
