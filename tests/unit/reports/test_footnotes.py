"""Test the footnotes of a report."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from example_configs import NUMBER_WORDS, SMALL
from run_files import (
    HOSTILE,
    collect,
    make_finished_sweep,
    make_run,
    set_status,
    write_results,
)

from transformer_jax.config import Row
from transformer_jax.data.splits import Split
from transformer_jax.files import JsonObject, read_json, write_json
from transformer_jax.reports.collect import collect_results, collect_runs, read_adhoc_statuses
from transformer_jax.reports.footnotes import describe_experiment, describe_tuning, list_footnotes
from transformer_jax.reports.report import write_report
from transformer_jax.sweeps.plan import Origin, Sweep, plan_sweep
from transformer_jax.sweeps.status import read_status
from transformer_jax.sweeps.tuning import choose_values, plan_tuning


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep in which one run failed and all others are done. Tests must not modify this sweep."""
    sweep = make_finished_sweep(tmp_path_factory.mktemp("report") / "s")
    set_status(sweep.runs[-1], "failed", phase="train", note=HOSTILE)
    return sweep


@pytest.fixture(scope="module")
def folder(sweep: Sweep) -> Path:
    """The folder that contains the sweep's report."""
    return write_report(collect(sweep))


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that tests may modify. It has no test scores, so reports do not test sentences."""
    return make_finished_sweep(tmp_path / "sweeps" / "s", rows=["base", "worse"], splits=["dev"])


def test_footnotes_say_how_the_sweep_was_made(dev_sweep: Sweep) -> None:
    command = "transformer-jax sweep table3 --data-from wmt14"
    replace(dev_sweep, origins=[Origin(command, "0123456789ab")]).store()
    replace(dev_sweep, origins=[Origin(f"{command} --seeds 5", "")]).store()
    notes = list_footnotes(collect(Sweep.open(dev_sweep.path)))
    assert notes[:2] == [
        "Corpus: a and b, with 64 tokens in the vocabulary.",
        "Budget: 8 steps of about 512 tokens each, with 4 steps of warmup and the paper's learning "
        "rate.",
    ]
    assert notes[2].startswith("Search: beam_size 4, length_penalty gnmt, length_penalty_alpha 0.6")
    assert f"Trained by: {command} (commit 0123456789ab)" in notes
    assert f"Trained by: {command} --seeds 5" in notes
    # The run folders may record different commits.
    for run, commit in zip(dev_sweep.runs, ("0123456789ab", "ba9876543210+"), strict=False):
        (run.path / "run.json").write_text(json.dumps({"versions": {"commit": commit}}))
    notes = list_footnotes(collect(Sweep.open(dev_sweep.path)))
    assert "Trained at commit ba9876543210+." in notes


@pytest.mark.parametrize(("split", "beam_size"), [("dev", 4), ("test", 2)])
def test_the_search_options_are_those_of_the_scores_on_a_set(
    sweep: Sweep, split: Split, beam_size: int
) -> None:
    first, *others = [read_status(run) for run in sweep.runs]
    scores: dict[Split, JsonObject] = {
        "dev": first.scores["dev"],
        "test": first.scores["test"] | {"decode": {"beam_size": 2}},
    }
    statuses = [replace(first, scores=scores), *others]
    _, _, search = describe_experiment(sweep, statuses, split)
    assert search.startswith(f"Search: beam_size {beam_size}, ")


def test_a_report_states_what_was_tuned_and_warns_of_values_at_the_edge(tmp_path: Path) -> None:
    rows = {"base": Row(SMALL)}
    rows |= {f"row{n}": Row(SMALL.change(model={"d_ff": 8 * n})) for n in (5, 6)}
    tuning = plan_tuning(rows, "train.learning_rate_scale", [0.5, 1.0, 2.0])
    sweep = plan_sweep(tmp_path / "s", rows, 2, tuning=tuning)
    sweep.store()
    for trial in sweep.trials:
        # The best value is 1 for base and row5, and 2 for row6.
        best = 2.0 if trial.row == "row6" else 1.0
        loss = abs(trial.config.train.learning_rate_scale - best)
        write_results(trial, 5 + loss, 5, splits=["dev"])
        set_status(trial, "done", finished=["train", "dev"])
    sweep = choose_values(sweep)
    sweep.store()
    for run in sweep.runs:
        write_results(run, 4.0 + 0.1 * run.seed, 5, splits=["dev"])
        set_status(run, "done", finished=["train", "dev"])
    results = collect(sweep)
    text = "\n".join(list_footnotes(results))
    assert "Tuned: train.learning_rate_scale, in each row" in text
    assert "Chosen: 0.5 in 0 of 3, 1.0 in 2 of 3, 2.0 in 1 of 3 rows." in text
    assert "so a value outside the list may be better: row6 (2.0)." in text
    folder = write_report(results)
    with (folder / "tuning.csv").open(newline="") as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == 9
    assert [x["row"] for x in trials if x["chosen"] == "True"] == ["base", "row5", "row6"]
    with (folder / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [x["tuned"] for x in table] == ["1.0", "1.0", "2.0"]
    # The tuned field does not count as a difference between the rows.
    assert [x["change"] for x in table] == ["base", "d_ff 40", "d_ff 48"]
    # With further values, each row chooses again, perhaps not the value of its present runs.
    longer = plan_tuning(rows, "train.learning_rate_scale", [0.5, 1.0, 2.0, 4.0])
    plan_sweep(sweep.path, rows, 2, tuning=longer).store()
    warning = "Warning: no value has been chosen for these rows: base, row5, row6. Their runs"
    assert warning in "\n".join(list_footnotes(collect(Sweep.open(sweep.path))))
    assert warning not in text


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"model": {"d_ff": 48}}, True),
        ({"train": {"optimizer": "adamw"}}, True),
        # The paper's learning rate depends on the width.
        ({"model": {"d_model": 32}}, False),
        ({"model": {"d_model": 32}, "train": {"peak_learning_rate": 0.001}}, False),
        ({"train": {"learning_rate_scale": 0.5}}, False),
        ({"train": {"schedule": "cosine"}}, False),
    ],
)
def test_a_report_states_that_rows_were_not_tuned(
    tmp_path: Path, change: dict[str, dict[str, object]], is_same: bool
) -> None:
    sweep = plan_sweep(
        tmp_path / "s", {"base": Row(SMALL), "other": Row(SMALL.change(**change))}, 1
    )
    # Runs that were trained separately may be part of tuned sweeps.
    assert describe_tuning(sweep) == []
    [note] = describe_tuning(replace(sweep, origins=[Origin("transformer-jax sweep", "")]))
    same = "Not tuned for each row: all rows use the same learning rate and schedule."
    assert note == (same if is_same else "Not tuned for each row: this sweep chose no values.")


def test_a_fixed_peak_does_not_depend_on_the_width(tmp_path: Path) -> None:
    fixed = SMALL.change(train={"peak_learning_rate": 0.001})
    rows = {"base": Row(fixed), "wide": Row(fixed.change(model={"d_model": 32}))}
    sweep = replace(plan_sweep(tmp_path / "s", rows, 1), origins=[Origin("sweep", "")])
    assert "all rows use the same learning rate" in describe_tuning(sweep)[0]


def test_footnotes_compare_signs_with_the_paper_and_name_missing_runs(folder: Path) -> None:
    text = (folder / "table.md").read_text()
    assert (
        "In this report (s), the difference in dev perplexity has the same sign as in the paper in "
        "2 of the 3 rows whose difference in the paper exceeds 0.01 ln perplexity. For comparison, "
        in text
    )
    assert re.search(r"this number would be \d+ if every row were worse than base\.", text)
    assert "Pooled standard deviations between seeds: " in text
    assert "Spearman's rank correlation with the paper's differences in test perplexity is" in text
    assert "two methods, and is not corrected for the number of rows and seeds." in text
    assert text.count("Missing: ") == 1
    assert "Missing: other/seed-2: failed, train:" in text


def test_one_footnote_names_all_runs_that_are_missing_for_the_same_reason(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        if run.seed == 1:
            # A run that has not started has no folder.
            run.status_file.unlink()
            shutil.rmtree(run.path)
    text = (write_report(collect(dev_sweep)) / "table.md").read_text()
    assert "- Missing: base/seed-1, worse/seed-1: queued\n" in text


def test_a_report_of_single_seeds_says_that_they_prove_nothing(dev_sweep: Sweep) -> None:
    single = plan_sweep(dev_sweep.path, dev_sweep.rows, 1)
    notes = " ".join(list_footnotes(collect(single)))
    assert "A difference without an interval proves nothing." in notes


def test_a_report_names_rows_with_another_vocabulary(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        vocabulary = {"sha256": "b" if run.row == "worse" else "a"}
        write_json(run.path / "run.json", {"vocabulary": vocabulary})
    notes = " ".join(list_footnotes(collect(dev_sweep)))
    start = "Rows whose vocabulary, development set, or test set differs from that of base: worse."
    assert start in notes


def test_a_report_states_that_scores_belong_to_different_steps(dev_sweep: Sweep) -> None:
    start = "The scores of runs with the same budget"
    assert start not in " ".join(list_footnotes(collect(dev_sweep)))
    [file] = dev_sweep.runs[0].path.glob("evaluations/dev-*/scores.json")
    write_json(file, read_json(file) | {"step": 4})
    note = f"{start} belong to different steps: 4, 8."
    assert note in list_footnotes(collect(dev_sweep))


def test_a_report_states_that_the_two_sets_were_scored_at_different_steps(tmp_path: Path) -> None:
    [run] = collect_runs([make_run(tmp_path / "run")], tmp_path / "out").runs
    write_results(run, 5.0, 5)
    [file] = run.path.glob("evaluations/test-*/scores.json")
    write_json(file, read_json(file) | {"step": 4})
    sweep = collect_runs([run.path], tmp_path / "out")
    notes = list_footnotes(collect_results(sweep, read_adhoc_statuses(sweep), "report"))
    start = "The scores of these runs on the development set and on the test set"
    assert f"{start} belong to different steps: {run.path}." in notes
    assert not any(note.startswith("The scores of runs with the same budget") for note in notes)
    assert f"{run.path}: was scored on test at step 4 of 8." in notes


def test_runs_with_different_budgets_are_scored_at_different_steps(tmp_path: Path) -> None:
    slow = SMALL.change(train={"steps": 16})
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL), "slow": Row(slow)}, 1)
    for run in sweep.runs:
        write_results(run, 5.0, 5, splits=["dev"])
        set_status(run, "done", finished=["train", "dev"])
        [file] = run.path.glob("evaluations/dev-*/scores.json")
        write_json(file, read_json(file) | {"step": run.config.train.steps})
    assert "different steps" not in " ".join(list_footnotes(collect(sweep)))


def test_footnotes_list_the_budgets_of_other_rows(tmp_path: Path) -> None:
    slow = SMALL.change(train={"steps": 16, "learning_rate_scale": 0.5})
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL), "slow": Row(slow)}, 1)
    _, budget, _ = describe_experiment(sweep, [read_status(run) for run in sweep.runs])
    assert budget == (
        "Budget: 8 steps (other rows: 16) of about 512 tokens each, with 4 steps of warmup and the "
        "paper's learning rate (other rows: 0.5 times the paper's learning rate)."
    )


def test_footnotes_separate_the_settings_of_other_rows(tmp_path: Path) -> None:
    changes = {"adamw": {"optimizer": "adamw"}, "both": {"optimizer": "lion", "schedule": "cosine"}}
    rows = {name: Row(SMALL.change(train=train)) for name, train in changes.items()}
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL), **rows}, 1)
    _, budget, _ = describe_experiment(sweep, [read_status(run) for run in sweep.runs])
    rate = "the paper's learning rate"
    assert f"(other rows: {rate}, optimizer adamw; {rate}, schedule cosine, optimizer" in budget


def test_footnotes_name_optimizers_and_schedules_that_are_not_the_papers(tmp_path: Path) -> None:
    train = {"optimizer": "muon", "schedule": "cosine", "peak_learning_rate": 1e-3}
    sweep = plan_sweep(tmp_path / "s", {"muon": Row(SMALL.change(train=train))}, 1)
    _, budget, _ = describe_experiment(sweep, [read_status(run) for run in sweep.runs])
    assert "of warmup and a peak rate of 0.001, schedule cosine, optimizer muon." in budget


def test_footnotes_describe_generated_lines(tmp_path: Path) -> None:
    lines = {"num_pairs": 1000, "max_numbers_per_line": 8, "max_digits": 6}
    config = SMALL.change(data={**NUMBER_WORDS, **lines})
    sweep = plan_sweep(tmp_path / "s", {"base": Row(config)}, 1)
    corpus, *_ = describe_experiment(sweep, [read_status(run) for run in sweep.runs])
    assert corpus == (
        "Corpus: number words, 1,000 pairs, up to 8 numbers per line, up to 6 digits per number, "
        "with 64 tokens in the vocabulary."
    )


def test_runs_that_no_command_planned_are_not_called_queued(dev_sweep: Sweep) -> None:
    more = plan_sweep(dev_sweep.path, dev_sweep.rows, 4, only=[])
    more.store()
    notes = list_footnotes(collect(Sweep.open(dev_sweep.path)))
    missing = [note for note in notes if note.startswith("Missing: ")]
    assert missing == ["Missing: base/seed-3: queued", "Missing: worse/seed-3: not planned"]
