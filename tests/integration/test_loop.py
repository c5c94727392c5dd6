"""Test that resumed runs match uninterrupted runs bit for bit, and that runs end correctly."""

import dataclasses
import io
import itertools
import json
import math
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL, metrics_of
from rich.console import Console
from run_files import collect, make_finished_sweep
from training_runs import QUIET, assert_same, resume, scores_of, signal_at_step, state_of, train

from transformer_jax.cli import main
from transformer_jax.config import ModelConfig
from transformer_jax.console import format_for_shell
from transformer_jax.data.prepare import find_prepared
from transformer_jax.errors import DivergedError, OutOfMemoryError, RunInterrupted
from transformer_jax.runs.metrics_file import read_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training import evaluation, loop, member
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.components import build_run_components
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training
from transformer_jax.training.step import TrainState, TrainStep

# Checkpoints are scheduled every 4 steps, and reports every 2 steps. The learning rate peaks at
# step 4.
OFF_SCHEDULE = 3


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (OFF_SCHEDULE, signal.SIGTERM),
        (OFF_SCHEDULE, signal.SIGHUP),
        *(pytest.param(x, signal.SIGTERM, marks=pytest.mark.exhaustive) for x in (4, 5)),
    ],
)
@pytest.mark.trials("a signal at a given step")
def test_an_interrupted_run_resumes_to_the_bits_of_an_uninterrupted_run(
    whole_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    number: signal.Signals,
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at_step(patch, step, number)
        message = f"{number.name}: saved at step {step}; resume with"
        with pytest.raises(RunInterrupted, match=message):
            train(SMALL, path)
    assert state_of(path)[0] == step
    resume(path)
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)
    assert scores_of(path) == scores_of(whole_run)


def signal_during_evaluation(patch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """Arrange for the `number`-th evaluation to receive SIGTERM when it calls a function."""
    function, calls = getattr(evaluation, name), itertools.count(1)

    def signal_and_call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return function(*arguments, **options)

    patch.setattr(evaluation, name, signal_and_call)


@pytest.mark.parametrize(
    ("number", "step", "name"), [(1, 4, "score_with_loss"), (2, 8, "perplexity")]
)
def test_an_evaluation_that_a_signal_stops_is_repeated_when_the_run_resumes(
    whole_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    step: int,
    name: str,
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_during_evaluation(patch, number, name)
        with pytest.raises(RunInterrupted, match=f"SIGTERM: saved at step {step}; resume with"):
            train(SMALL, path)
    assert state_of(path)[0] == step
    assert step not in scores_of(path)
    assert step not in dev_reports(path)
    resume(path)
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)
    assert scores_of(path) == scores_of(whole_run)
    last, whole = (x / "checkpoints/8/checkpoint.json" for x in (path, whole_run))
    assert json.loads(last.read_text()) == json.loads(whole.read_text())


@pytest.mark.slow
def test_an_evaluation_that_a_signal_stops_can_end_training_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checkpoint at step 6 is the second one without an improvement, and no report is scheduled
    # at this step.
    changes = {"checkpoint_every": 2, "patience": 2, "log_every": 4, "bleu_every": 100}
    config = SMALL.change(train=changes)

    def score_worse_and_worse(patch: pytest.MonkeyPatch, first: float) -> None:
        values = itertools.count(first)
        patch.setattr(evaluation, "perplexity", lambda _: float(next(values)))

    with monkeypatch.context() as patch:
        score_worse_and_worse(patch, 5)
        whole = train(config, tmp_path / "whole")
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        score_worse_and_worse(patch, 5)
        signal_during_evaluation(patch, 3, "score_with_loss")
        with pytest.raises(RunInterrupted, match="at step 6;"):
            train(config, path)
    with monkeypatch.context() as patch:
        score_worse_and_worse(patch, 7)
        resume(path)
    assert state_of(path)[0] == 6
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)
    assert train_reports(path) == [4, 6]
    assert scores_of(path) == scores_of(whole)


def test_an_interrupted_run_says_that_it_is_saved_before_it_waits_for_the_compiler(
    half_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.open(Path(shutil.copytree(half_run, tmp_path / "run")))
    longer = folder.with_config(folder.config.change(train={"steps": 8}))
    signal_at_step(monkeypatch, 5, signal.SIGTERM)
    monkeypatch.setattr(loop.CompiledStep, "is_compiling_ahead", lambda _: True)
    console = Console(file=io.StringIO())
    with console.capture() as captured, pytest.raises(RunInterrupted):
        loop.run_training(longer, console)
    assert "saved at step 5; waiting for a compilation to finish\n" in captured.get()


@pytest.mark.exhaustive
def test_the_same_command_gives_the_same_bits(whole_run: Path, tmp_path: Path) -> None:
    # `.ci/run` skips this test but runs `test_a_trace_changes_no_bit`, which verifies the same
    # claim.
    path = train(SMALL, tmp_path / "again")
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)


@pytest.fixture(scope="module")
def run_of_five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path to a run that ended at step 5, where no checkpoint or report is scheduled."""
    return train(SMALL.change(train={"steps": 5}), tmp_path_factory.mktemp("five") / "run")


@pytest.mark.slow
def test_a_run_that_ended_off_schedule_and_is_extended_equals_one_long_run(
    whole_run: Path, run_of_five: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(run_of_five, tmp_path / "run"))
    assert state_of(path)[0] == metrics_of(path)[-1]["step"] == 5
    resume(path, train={"steps": 8})
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)
    assert RunFolder.open(path).config == RunFolder.open(whole_run).config


def read_reports(run: Path) -> list[dict[str, Any]]:
    """Return the training reports in metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["split"] == "train"]


@pytest.mark.slow
def test_flops_count_each_step_once_even_if_the_report_interval_changes(
    whole_run: Path, run_of_five: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(run_of_five, tmp_path / "run"))
    # Only the resumed run's schedule includes a report at step 5. The report at step 8 includes the
    # metrics of step 5.
    resume(path, train={"steps": 8, "log_every": 5})
    reports, usual = read_reports(path), read_reports(whole_run)
    assert [line["step"] for line in reports] == [2, 4, 8]
    flops = sum(line["flops"] for line in usual)
    assert sum(line["flops"] for line in reports) == flops > 0

    # Both FLOPs columns of a sweep report include the steps before and after the interruption.
    sweep = make_finished_sweep(tmp_path / "sweep", ["base", "same"], ["dev"])
    for run in sweep.runs:
        shutil.copy((whole_run if run.row == "base" else path) / "metrics.jsonl", run.path)
    rows = collect(sweep).rows
    for name, lines in (("base", read_reports(whole_run)), ("same", read_reports(path))):
        at_peak = sum(line["flops"] / line["utilization"] for line in lines)
        assert rows[name].flops == (flops, pytest.approx(at_peak))


@pytest.mark.slow
def test_a_killed_run_drops_the_reports_that_it_repeats(
    whole_run: Path, half_run: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(half_run, tmp_path / "run"))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "train", "loss": 1.0}\n{"step": 7, "sp')
    resume(path, train={"steps": 8})
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)


def test_a_checkpoint_names_the_versions_that_wrote_it(whole_run: Path) -> None:
    description = json.loads((whole_run / "checkpoints/8/checkpoint.json").read_text("utf-8"))
    assert description["custom_metadata"]["environment"]["jax"] == jax.__version__


def test_metrics_and_tensorboard_events_have_the_same_values(whole_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator: Any = EventAccumulator(
        str(whole_run / "tensorboard"), size_guidance={"tensors": 0}
    )
    accumulator.Reload()
    events = {
        (tag, event.step): event.tensor_proto.float_val[0]
        for tag in accumulator.Tags()["tensors"]
        for event in accumulator.Tensors(tag)
        # Hyperparameters and samples are not numbers.
        if event.tensor_proto.float_val
    }
    lines = read_metrics(whole_run / "metrics.jsonl")
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"),
        (4, "train"),
        (4, "dev"),
        (6, "train"),
        (8, "train"),
        (8, "dev"),
    ]
    for line in lines:
        for key in set(line) - {"step", "split", "time"}:
            value = events.pop((f"{line['split']}/{key}", line["step"]))
            np.testing.assert_allclose(value, line[key], rtol=1e-6)
    assert not events


def test_a_run_keeps_sample_translations_of_each_evaluation(whole_run: Path) -> None:
    text = (whole_run / "samples" / "step-8.txt").read_text("utf-8")
    assert len(text.splitlines()) == 3 * 20


def make_gradients_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the gradients with NaN at step 3 and at every step from step 6 onward."""
    make_step = loop.TrainStep

    class NanStep(TrainStep):
        def compute_gradients(self, state: TrainState, batch: Any) -> Any:
            gradients, loss = super().compute_gradients(state, batch)
            is_nan = (state.step == 2) | (state.step >= 5)
            return jax.tree.map(lambda g: jnp.where(is_nan, jnp.nan, g), gradients), loss

    def make_nan_step(*arguments: Any) -> TrainStep:
        step = make_step(*arguments)
        return NanStep(step.model, step.config)

    monkeypatch.setattr(loop, "TrainStep", make_nan_step)


@pytest.mark.slow
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gradients_nan(monkeypatch)
    path = train(SMALL.change(train={"bleu_every": 100}), tmp_path / "run")
    reports, usual = read_reports(path), read_reports(whole_run)
    assert [report.get("skipped") for report in reports] == [None, 1, 1, 2]
    # Before the first skipped step, the runs differ only in rounding, because they use different
    # compiled programs.
    assert reports[0].keys() == usual[0].keys()
    assert reports[0]["perplexity"] == pytest.approx(usual[0]["perplexity"], rel=1e-3)
    assert reports[2]["perplexity"] != usual[2]["perplexity"]
    # A skipped step does not count as an update, so the learning rate grows more slowly.
    assert reports[1]["learning_rate"] < usual[1]["learning_rate"]
    # Resume from step 4, as if the latest checkpoint had never been written.
    resumed = Path(shutil.copytree(path, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoints" / "8")
    resume(resumed)
    assert_same(state_of(resumed), state_of(path))
    assert metrics_of(resumed) == metrics_of(path)


# Between reports and checkpoints, the loop reads each step's result two steps later.
@pytest.mark.parametrize(
    ("log_every", "last"), [(100, 16), pytest.param(1, 15, marks=pytest.mark.exhaustive)]
)
@pytest.mark.exhaustive
@pytest.mark.trials("losses or gradients that are not finite")
def test_ten_skipped_steps_in_a_row_end_the_run_and_their_pairs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int, last: int
) -> None:
    make_gradients_nan(monkeypatch)
    config = SMALL.change(train={"steps": 50, "checkpoint_every": 4, "log_every": log_every})
    path = tmp_path / "run"
    with pytest.raises(DivergedError, match=rf"up to step {last};.*train\.learning_rate_scale"):
        train(config, path)
    listed = json.loads((path / "diverged.json").read_text())["pairs"]
    assert sorted(map(int, listed)) == list(range(6, last + 1))
    folder = RunFolder.open(path)
    prepared = find_prepared(config.data, folder.vocabulary, folder.fingerprint)
    batches = prepared.batches(config)
    assert all(listed[str(step)] == batches.pairs(step - 1).tolist() for step in range(6, last + 1))
    step, state = state_of(path)
    assert step >= 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    # An interruption does not reset the count of skipped steps.
    with pytest.raises(DivergedError, match=f"up to step {last};"):
        resume(path)


def test_a_run_without_a_finite_perplexity_ends_before_the_checkpoint_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "perplexity", lambda _: math.nan)
    with pytest.raises(DivergedError, match=r"development set is nan at step 4;"):
        train(SMALL, tmp_path / "run")
    assert not scores_of(tmp_path / "run")


@pytest.mark.slow
def test_a_state_with_an_infinite_perplexity_is_not_saved(tmp_path: Path) -> None:
    diverging = {
        "learning_rate_scale": 1e30,
        "max_minutes_between_checkpoints": 1e-6,
        "log_every": 100,
    }
    path = tmp_path / "run"
    with pytest.raises(
        DivergedError, match=r"development set is nan at step 4;.*train\.learning_rate_scale"
    ):
        train(SMALL.change(train=diverging), path)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state_of(path)[1]))
    assert not scores_of(path)


@pytest.mark.slow
def test_an_out_of_memory_error_gives_options_that_make_the_run_resume(
    half_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(half_run, tmp_path / "run"))

    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(loop.CompiledStep, "__call__", run_out_of_memory)
        with pytest.raises(OutOfMemoryError) as caught:
            resume(path, train={"steps": 5})
    assert "train.gradient_accumulation_steps=2" in str(caught.value)
    message = format_for_shell(caught.value)
    assert "\n" not in message
    command = shlex.split(message.split("`transformer-jax ")[1].split("`")[0])
    options = ["--train.gradient-accumulation-steps", "2", "--model.remat"]
    assert options[2] in message
    assert " ".join(options[:2]) in message
    assert main([*command, *options]) == 0
    assert state_of(path)[0] == 5


@pytest.mark.slow
def test_an_evaluation_that_runs_out_of_memory_does_not_suggest_smaller_training_steps(
    half_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    path = Path(shutil.copytree(half_run, tmp_path / "run"))
    monkeypatch.setattr(evaluation, "score_with_loss", run_out_of_memory)
    with pytest.raises(OutOfMemoryError, match="to evaluate the development set") as caught:
        resume(path, train={"steps": 5})
    assert "train." not in format_for_shell(caught.value)


@pytest.mark.parametrize("model", [{"architecture": "rnn"}, {"remat": True}], ids=["rnn", "remat"])
def test_an_out_of_memory_error_suggests_remat_only_if_it_can_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    config = dataclasses.replace(SMALL, model=ModelConfig(**model))
    folder = create_run(config, tmp_path / "run", QUIET)
    monkeypatch.setattr(member, "build_run_components", run_out_of_memory)
    with pytest.raises(OutOfMemoryError, match=r"gradient_accumulation_steps=2") as caught:
        loop.run_training(folder, QUIET)
    assert "remat" not in str(caught.value)


def dev_reports(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metrics_of(path) if line["split"] == "dev"}


def test_a_report_waits_for_later_steps_to_start_unless_a_checkpoint_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, written = [0], list[tuple[str, float, int]]()
    run_step = CompiledStep.__call__

    def count_and_run(*arguments: Any) -> Any:
        started[0] += 1
        return run_step(*arguments)

    def callback(report: dict[str, float]) -> None:
        split = "dev" if "dev/perplexity" in report else "train"
        written.append((split, report["step"], started[0]))

    monkeypatch.setattr(CompiledStep, "__call__", count_and_run)
    config = SMALL.change(train={"steps": 8, "log_every": 1, "checkpoint_every": 5})
    run_training(create_run(config, tmp_path / "run", QUIET), QUIET, callback=callback)
    # A report has the metrics of a step that has finished while the next two steps run. The timer
    # for recovery checkpoints can only make a report earlier.
    assert [(split, step) for split, step, _ in written] == [
        *(("train", step) for step in range(1, 6)),
        ("dev", 5),
        *(("train", step) for step in range(6, 9)),
        ("dev", 8),
    ]
    assert all(step <= count <= min(step + 2, 5 if step <= 5 else 8) for _, step, count in written)
    assert sum(count == step + 2 for _, step, count in written) >= 2


def train_reports(path: Path) -> list[int]:
    return [line["step"] for line in metrics_of(path) if line["split"] == "train"]


@pytest.mark.exhaustive
def test_checkpoints_can_be_scheduled_in_epochs_and_translated_less_often(tmp_path: Path) -> None:
    per_epoch = {"checkpoint_unit": "epoch", "checkpoint_every": 1, "bleu_every": 2}
    folder = create_run(SMALL.change(train=per_epoch), tmp_path / "run", QUIET)
    epoch = build_run_components(folder).batches.per_epoch
    last = 4 * epoch + 1
    longer = folder.with_config(folder.config.change(train={"steps": last}))
    num_scheduled = loop.run_training(longer, QUIET)
    reports = dev_reports(folder.path)
    assert list(reports) == [*range(epoch, last, epoch), last]
    translated = [step for step, values in reports.items() if "bleu" in values]
    assert translated == [2 * epoch, 4 * epoch, last]
    # Three scheduled checkpoints are kept. No checkpoint is scheduled at the last step.
    assert num_scheduled == len(scores_of(folder.path)) == 3
    assert max(scores_of(folder.path)) == 4 * epoch


@pytest.mark.exhaustive
def test_patience_ends_a_run_that_no_longer_improves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Step 2 has the best perplexity. From step 3 to step 5, the perplexity improves from 7.0 to
    # 5.5, but it is never as good as at step 2.
    perplexities = iter([9.0, 5.0, 7.0, 6.0, 5.5, 5.4, 5.3, 5.2, 5.1])
    monkeypatch.setattr(evaluation, "perplexity", lambda _: next(perplexities))
    often = {"checkpoint_every": 1, "patience": 3, "keep_checkpoints": 1, "bleu_every": 100}
    path = train(SMALL.change(train=often), tmp_path / "run")
    assert list(dev_reports(path)) == [1, 2, 3, 4, 5]
    assert train_reports(path) == [2, 4, 5]
    # The run stays at step 5, even though train.steps is higher. The printed message explains why.
    assert main(["resume", str(path), "--train.steps", "9"]) == 0
    assert (
        "at step 5: nothing to do (early stopping: train.patience is 3)" in capsys.readouterr().out
    )
    assert state_of(path)[0] == 5
    resume(path, train={"patience": 5})
    assert list(dev_reports(path)) == [1, 2, 3, 4, 5, 6, 7]
    assert train_reports(path) == [2, 4, 6, 7]
    # Unlike the perplexity, the smoothed loss of the last checkpoint is better than at step 2.
    assert dev_reports(path)[7]["smoothed_loss"] < dev_reports(path)[2]["smoothed_loss"]
    resume(path, train={"patience_metric": "smoothed_loss"})
    assert list(dev_reports(path)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
