"""Test how values are chosen for the rows in a sweep on the development set."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import set_status, write_results

from transformer_jax import api
from transformer_jax.config import Config, Row
from transformer_jax.config.rows import with_control
from transformer_jax.errors import ConfigError, DivergedError, SweepFailedError, UsageError
from transformer_jax.files import read_json
from transformer_jax.sweeps.plan import Sweep, SweepRun, choose_folder, plan_sweep
from transformer_jax.sweeps.status import RunStatus, check_finished, read_status
from transformer_jax.sweeps.tuning import choose_values, open_trials, plan_tuning

FIELD = "train.learning_rate_scale"
ROWS = {"base": Row(SMALL), "wide": Row(SMALL.change(model={"d_ff": 48}))}


def plan(path: Path, rows: dict[str, Row] = ROWS, *, trial_seeds: int = 1) -> Sweep:
    """Store a sweep with two seeds that tries three learning rates."""
    sweep = plan_sweep(path, rows, 2, tuning=plan_tuning(rows, FIELD, [0.5, 1.0, 2.0], trial_seeds))
    sweep.store()
    return sweep


def finish(run: SweepRun, perplexity: float) -> None:
    write_results(run, perplexity, 5, splits=["dev"])
    set_status(run, "done", finished=["train", "dev"])


def finish_all(sweep: Sweep, perplexities: dict[str, list[float]]) -> None:
    """Finish one trial for each value of each row."""
    for row, values in perplexities.items():
        trials = [run for run in sweep.trials if run.row == row]
        for run, perplexity in zip(trials, values, strict=True):
            finish(run, perplexity)


def rate_of(run: SweepRun) -> float:
    return run.config.train.learning_rate_scale


def test_each_row_has_a_trial_for_each_value_and_trial_seed(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s", trial_seeds=2)
    assert len(sweep.trials) == len(ROWS) * 3 * 2
    first = sweep.trials[0]
    assert first.name == "tune/base/0.5/seed-10000"
    assert first.path == tmp_path / "s" / first.name
    assert Config.from_dict(read_json(first.config_file)) == first.config
    assert {(run.row, rate_of(run), run.seed) for run in sweep.trials} == {
        (row, rate, seed) for row in ROWS for rate in (0.5, 1, 2) for seed in (10_000, 10_001)
    }
    assert sweep.find(first.name) == Sweep.open(sweep.path).find(first.name) == first
    # No trial has the same seed as another run.
    assert not {run.seed for run in sweep.trials} & set(sweep.seeds)


def test_a_row_waits_for_all_of_its_trials(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s")
    assert not any(run.config_file.exists() for run in sweep.runs)
    finish_all(sweep, {"base": [5.0, 4.0, 4.5]})
    finish(sweep.find("tune/wide/2.0/seed-10000"), 3.0)
    chosen = choose_values(sweep)
    assert chosen.tuning is not None
    assert chosen.tuning.chosen == {"base": 1.0}
    assert {run.row for run in open_trials(chosen).runs} == {"wide"}
    chosen.store()
    assert {run.row for run in sweep.runs if run.config_file.exists()} == {"base"}


def test_the_runs_of_a_row_use_the_chosen_value(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s")
    finish_all(sweep, {"base": [5.0, 4.0, 4.5], "wide": [5.0, 5.0, 4.9]})
    choose_values(sweep).store()
    stored = Sweep.open(sweep.path)
    assert {(run.row, rate_of(run)) for run in stored.runs} == {("base", 1.0), ("wide", 2.0)}
    for run in stored.runs:
        assert Config.from_dict(read_json(run.config_file)) == run.config
    # The rows themselves differ only in what the sweep compares.
    assert stored.rows == sweep.rows
    # Once the values are chosen, the trials are no longer needed.
    shutil.rmtree(sweep.path / "tune")
    assert choose_values(stored) == stored
    again = plan_sweep(sweep.path, ROWS, 3, tuning=plan_tuning(ROWS, FIELD, [0.5, 1.0, 2.0]))
    assert [rate_of(run) for run in again.runs] == [1.0, 2.0] * 3


def test_the_mean_log_perplexity_over_trial_seeds_decides(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s", trial_seeds=2)
    # The value 1 has the lowest mean log perplexity, and 0.5 has the lowest single perplexity.
    finish_all(sweep, {"base": [2.0, 4.0, 9.0, 9.0, 4.0, 9.0]})
    tuning = choose_values(sweep).tuning
    assert tuning is not None
    assert math.sqrt(2.0 * 9.0) > math.sqrt(4.0 * 4.0)
    assert tuning.chosen == {"base": 1.0}


def test_the_first_of_equally_good_values_is_chosen(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s")
    # The trials of the second row are equally bad, although none of them failed.
    finish_all(sweep, {"base": [4.0, 4.0, 5.0], "wide": [math.inf] * 3})
    tuning = choose_values(sweep).tuning
    assert tuning is not None
    assert tuning.chosen == {"base": 0.5, "wide": 0.5}


def test_a_diverged_trial_loses_and_another_failure_stops_the_sweep(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s")
    small, middle, large = (run for run in sweep.trials if run.row == "base")
    finish(small, 9.0)
    finish(middle, 8.0)
    set_status(large, "failed", note="not finite", exit_code=DivergedError.exit_code)
    tuning = choose_values(sweep).tuning
    assert tuning is not None
    assert tuning.chosen == {"base": 1.0}
    set_status(large, "failed", note="no space left", exit_code=74)
    with pytest.raises(SweepFailedError, match=r"1 of 6 runs failed: tune/base/2.0/seed-10000"):
        choose_values(sweep)
    unchanged = choose_values(sweep, retry_failed=True).tuning
    assert unchanged == sweep.tuning


def test_a_row_that_diverges_with_every_value_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_control(ROWS)
    sweep = plan(tmp_path / "s", rows)
    trained: list[list[str]] = []

    def launch(part: Sweep, *_: object, **__: object) -> list[RunStatus]:
        trained.append([run.name for run in part.runs])
        for run in part.runs:
            if run.is_trial and run.row == "base":
                set_status(run, "failed", exit_code=DivergedError.exit_code)
            elif run.is_trial:
                finish(run, 5.0)
        return [read_status(run) for run in part.runs]

    monkeypatch.setattr(api, "launch", launch)
    monkeypatch.setattr(api, "find_slots", lambda *_: [])
    statuses = api.launch_sweep(sweep, group=1, quiet=True)
    diverged = [run.name for run in sweep.trials if run.row == "base"]
    others = ["wide/seed-0", "wide/seed-1"]
    # Otherwise, `retry_failed` would train the diverged trials twice.
    assert trained[1] == others
    with pytest.raises(SweepFailedError, match=f"3 of 5 runs failed: {', '.join(diverged)}"):
        check_finished(statuses)
    # Runs without a chosen value have no config file, so they cannot be trained.
    stored = Sweep.open(sweep.path)
    assert (stored.rows, stored.seeds) == (sweep.rows, [0, 1])
    assert [run.name for run in stored.runs if run.config_file.exists()] == others
    assert stored.tuning is not None
    assert stored.tuning.chosen == {"wide": 0.5}
    # The same command continues with the same runs.
    api.launch_sweep(plan(sweep.path, rows), group=1, quiet=True)
    assert trained[2:] == [diverged, others]
    for run in sweep.trials:
        set_status(run, "failed", exit_code=DivergedError.exit_code)
    with pytest.raises(SweepFailedError, match=f"all rows diverged with every value of {FIELD}"):
        choose_values(sweep)


def test_a_sweep_keeps_its_tuning(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tuning = plan_tuning(ROWS, FIELD, [0.5, 1.0, 2.0])
    plan(path)
    other = plan_tuning(ROWS, FIELD, [0.5, 1.0])
    assert choose_folder(path, ROWS, tuning) == path
    for changed in (None, other):
        assert choose_folder(path, ROWS, changed) == tmp_path / "s-2"
        with pytest.raises(UsageError, match=rf"tunes {FIELD} \(0.5 1.0 2.0; seeds 10000\), but"):
            plan_sweep(path, ROWS, 1, tuning=changed).store()


def test_a_longer_list_of_values_adds_trials_to_a_sweep(tmp_path: Path) -> None:
    path, rows = tmp_path / "s", with_control(ROWS)
    sweep = plan(path, rows)
    finish_all(sweep, {"base": [5.0, 4.0, 4.5], "wide": [5.0, 4.5, 4.0]})
    choose_values(sweep).store()
    longer = plan_tuning(rows, FIELD, [0.5, 1, 2, 4])
    assert choose_folder(path, rows, longer) == path
    sweep = plan_sweep(path, rows, 2, tuning=longer)
    sweep.store()
    added = [run for run in open_trials(sweep).runs if read_status(run).status == "queued"]
    assert [run.name for run in added] == [f"tune/{row}/4.0/seed-10000" for row in ROWS]
    # The earlier choices do not count until the new trials have ended.
    tuning = Sweep.open(path).tuning
    assert tuning is not None
    assert not tuning.chosen
    with pytest.raises(UsageError, match="tunes"):
        plan(path, rows)
    for run, perplexity in zip(added, [3.0, 6.0], strict=True):
        finish(run, perplexity)
    # The best value for wide, 2, is still the best one.
    best = r"\(new value in parentheses\): base \(4.0\), control \(4.0\); to"
    with pytest.raises(UsageError, match=best):
        choose_values(sweep).store()
    for row in ("base", "control"):
        (path / row).rename(tmp_path / row)
    choose_values(sweep).store()
    files = [run.config_file for run in Sweep.open(path).runs]
    rates = [read_json(file)["train"]["learning_rate_scale"] for file in files]
    assert rates == [4, 2, 4] * 2


def test_integers_and_floats_are_the_same_values() -> None:
    tuning = plan_tuning(ROWS, FIELD, [0.5, 1])
    trials = plan_sweep(Path("s"), ROWS, 1, tuning=tuning).trials
    assert [run.name for run in trials if run.row == "base"] == [
        "tune/base/0.5/seed-10000",
        "tune/base/1.0/seed-10000",
    ]
    assert str(plan_tuning(ROWS, "train.warmup_steps", [4, 8]).values) == "(4, 8)"


def test_a_value_that_a_row_cannot_use_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"row wide sets model.d_ff itself"):
        plan_tuning(ROWS, "model.d_ff", [32, 48])
    with pytest.raises(ConfigError, match=r"model.dropout must be at least 0 and below 1"):
        plan_tuning(ROWS, "model.dropout", [0.1, 1.5])
    with pytest.raises(ConfigError, match=f"{FIELD} must be positive and finite in float32"):
        plan_tuning(ROWS, FIELD, [10**400, 1])
    with pytest.raises(ConfigError, match="unknown field 'learning_rate'"):
        plan_tuning(ROWS, "train.learning_rate", [1, 2])
    for values in ([1.0], [1.0, 1.0]):
        with pytest.raises(UsageError, match="at least two different values"):
            plan_tuning(ROWS, FIELD, values)
    with pytest.raises(UsageError, match=r"train\.seed cannot be tuned: the trials determine it"):
        plan_tuning(ROWS, "train.seed", [1, 2])
    for field in ("data.vocab_size", "decode.beam_size"):
        with pytest.raises(UsageError, match="only the fields of model and train can be tuned"):
            plan_tuning(ROWS, field, [1, 2])
    with pytest.raises(UsageError, match="number of trial seeds must be from 1 to"):
        plan_tuning(ROWS, FIELD, [1.0, 2.0], 0)
    with pytest.raises(UsageError, match="a row named 'tune'"):
        plan_tuning({"base": ROWS["base"], "tune": ROWS["wide"]}, FIELD, [1.0, 2.0])


def test_a_sweep_without_tuning_has_no_trials(tmp_path: Path) -> None:
    sweep = plan_sweep(tmp_path / "s", ROWS, 1)
    assert open_trials(sweep).runs == sweep.trials == []
    assert choose_values(sweep) == sweep == replace(sweep, runs=sweep.all_runs)
