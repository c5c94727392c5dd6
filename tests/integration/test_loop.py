import dataclasses
import gzip
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from small import SMALL, metrics_of

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.config import Config
from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import (
    ConfigError,
    DataError,
    DivergedError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    UsageError,
)
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.training import loop
from transformer_jax.training.create_run import create_run
from transformer_jax.training.sharding import CompiledStep
from transformer_jax.training.step import TrainState, TrainStep, init_state, make_train_step
from transformer_jax.training.throughput import Meter

QUIET = Console(quiet=True)


def train(config: Config, path: Path, **options: Any) -> Path:
    loop.run_training(create_run(config, path, QUIET, **options), QUIET)
    return path


def resume(path: Path, **sections: dict[str, Any]) -> Path:
    folder = RunDirectory.open(path)
    loop.run_training(folder.with_config(folder.config.change(**sections)), QUIET)
    return path


def state_of(path: Path) -> Any:
    """Return parameters and optimizer of the newest checkpoint."""
    run = transformer_jax.load(path, average_checkpoints=1)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: init_state(run.model, run.config.train))
    parts = {"params": shapes.params, "optimizer": shapes.optimizer}
    with CheckpointManager(path / "checkpoints", run.folder.identity) as checkpoints:
        latest = checkpoints.latest_valid()
        assert latest is not None
        return latest, checkpoints.restore(latest, on_device(parts, here))


def scores_of(path: Path) -> dict[int, float]:
    with CheckpointManager(path / "checkpoints", RunDirectory.open(path).identity) as checkpoints:
        return checkpoints.scores


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all steps at once."""
    return train(SMALL, tmp_path_factory.mktemp("runs") / "whole")


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a SIGTERM when it has done so many steps."""
    add, count = loop.Meter.add, itertools.count(1)

    def counting(meter: loop.Meter, *arguments: Any) -> int:
        skipped = add(meter, *arguments)
        if next(count) == steps:
            signal.raise_signal(signal.SIGTERM)
        return skipped

    monkeypatch.setattr(loop.Meter, "add", counting)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_stop_and_resume_gives_the_same_bits_as_going_through(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    # Off schedule (3, 5) and on it (4); while the rate grows and after; with dropout.
    path = tmp_path / "parts"
    with monkeypatch.context() as patch:
        interrupt_after(stop, patch)
        with pytest.raises(RunInterrupted, match=f"SIGTERM: saved at step {stop};"):
            train(SMALL, path)
    assert state_of(path)[0] == stop
    resume(path)
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)
    assert scores_of(path) == scores_of(whole)


@pytest.mark.parametrize("steps", [4, pytest.param(5, id="off schedule")])
def test_some_of_the_steps_and_then_all_of_them_equal_all_at_once(
    whole: Path, tmp_path: Path, steps: int
) -> None:
    path = train(SMALL.change(train={"steps": steps}), tmp_path / "some")
    assert state_of(path)[0] == steps
    assert metrics_of(path)[-1]["step"] == steps
    resume(path, train={"steps": 8})
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)
    assert RunDirectory.open(path).config == RunDirectory.open(whole).config


def test_a_checkpoint_names_the_versions_that_wrote_it(whole: Path) -> None:
    description = json.loads((whole / "checkpoints" / "8" / "checkpoint.json").read_text("utf-8"))
    assert description["custom_metadata"]["versions"]["jax"] == jax.__version__


def test_the_same_command_gives_the_same_bits(whole: Path, tmp_path: Path) -> None:
    path = train(SMALL, tmp_path / "again")
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)


def test_micro_batches_and_remat_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    path = train(SMALL.change(train={"steps": 2}), tmp_path / "run")
    resume(path, train={"steps": 4, "gradient_accumulation_steps": 2}, model={"remat": True})
    assert state_of(path)[0] == 4


def test_a_run_that_was_killed_forgets_reports_that_come_again(whole: Path, tmp_path: Path) -> None:
    path = train(SMALL.change(train={"steps": 4}), tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "train", "loss": 1.0}\n{"step": 7, "sp')
    resume(path, train={"steps": 8})
    assert metrics_of(path) == metrics_of(whole)


def test_metrics_and_events_tell_the_same(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(whole / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    told = {
        (tag, event.step): event.tensor_proto.float_val[0]
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    }
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
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
            written = told.pop((f"{line['split']}/{key}", line["step"]))
            np.testing.assert_allclose(written, line[key], rtol=1e-6)
    assert not told


def test_a_run_keeps_translations_of_each_scored_step(whole: Path) -> None:
    text = (whole / "samples" / "step-8.txt").read_text("utf-8")
    assert len(text.splitlines()) == 3 * 20


def test_another_experiment_is_refused_field_by_field(whole: Path) -> None:
    folder = RunDirectory.open(whole)
    other = folder.config.change(model={"dropout": 0.2}, train={"seed": 1, "steps": 9})
    with pytest.raises(ConfigError) as caught:
        folder.with_config(other)
    assert "model.dropout 0.1 -> 0.2" in str(caught.value)
    assert "train.seed 0 -> 1" in str(caught.value)
    assert "steps" not in str(caught.value)
    assert RunDirectory.open(whole).config == folder.config


def test_a_run_begins_with_the_parameters_of_another(whole: Path, tmp_path: Path) -> None:
    config = SMALL.change(train={"seed": 3, "steps": 1})
    folder = create_run(config, tmp_path / "next", QUIET, init_from=whole)
    other = transformer_jax.load(whole)
    mine = transformer_jax.load(folder.path)
    assert mine.step == 0
    assert_same(mine.params, other.params)
    assert mine.vocabulary.target.model == other.vocabulary.target.model
    loop.run_training(folder, QUIET)
    assert state_of(folder.path)[0] == 1


def test_parameters_of_another_shape_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do not fit this model"):
        create_run(SMALL.change(model={"d_ff": 48}), tmp_path / "x", QUIET, init_from=whole)
    assert not (tmp_path / "x").exists()


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Let the gradients of these steps, counted from 1, hold something that is no number."""
    make = loop.make_train_step

    def poisoned(*arguments: Any) -> TrainStep:
        step = make(*arguments)

        def sums(state: TrainState, batch: Any, part: Any) -> Any:
            gradients, loss = step.sums(state, batch, part)
            is_bad = jnp.isin(state.step + 1, jnp.asarray(steps))
            return jax.tree.map(lambda g: jnp.where(is_bad, jnp.nan, g), gradients), loss

        return dataclasses.replace(step, sums=sums)

    monkeypatch.setattr(loop, "make_train_step", poisoned)


def test_a_step_that_is_not_finite_is_skipped_and_told(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 3, 5)
    path = train(SMALL, tmp_path / "run")
    told = [line.get("skipped") for line in metrics_of(path) if line["split"] == "train"]
    assert told == [None, 1, 1, None]
    # Up to the first of them nothing was another.
    assert metrics_of(path)[0] == metrics_of(whole)[0]
    assert metrics_of(path)[-1]["perplexity"] != metrics_of(whole)[-1]["perplexity"]
    rates = [line["learning_rate"] for line in metrics_of(path) if line["split"] == "train"]
    usual = [line["learning_rate"] for line in metrics_of(whole) if line["split"] == "train"]
    assert rates[0] == usual[0]
    assert rates[1] < usual[1]
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(RunInterrupted):
            train(SMALL, tmp_path / "parts")
    resume(tmp_path / "parts")
    assert_same(state_of(tmp_path / "parts"), state_of(path))
    assert metrics_of(tmp_path / "parts") == metrics_of(path)


# Where nothing is told, up to two more steps have begun before the tenth is known.
@pytest.mark.parametrize(("log_every", "last"), [(1, 15), (100, 16)])
def test_ten_such_steps_in_a_row_end_a_run_and_name_the_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int, last: int
) -> None:
    poison(monkeypatch, 3, *range(6, 100))
    train_config = {"steps": 50, "checkpoint_every": 4, "log_every": log_every}
    config = SMALL.change(train=train_config)
    with pytest.raises(
        DivergedError, match=rf"in a row, up to {last}: .*--train.learning-rate-scale"
    ):
        train(config, tmp_path / "run")
    named = json.loads((tmp_path / "run" / "diverged.json").read_text())["pairs"]
    assert sorted(map(int, named)) == list(range(6, last + 1))
    folder = RunDirectory.open(tmp_path / "run")
    batches = prepare(config.data, folder.vocabulary, folder.fingerprint).batches(512, 0)
    assert all(named[str(step)] == batches.pairs(step - 1).tolist() for step in range(6, last + 1))
    step, state = state_of(tmp_path / "run")
    assert step >= 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    # Interruptions do not begin the count anew.
    with pytest.raises(DivergedError, match=f"up to {last}:"):
        resume(tmp_path / "run")


def test_nothing_is_saved_of_a_model_that_finds_the_text_impossible(tmp_path: Path) -> None:
    wild = SMALL.change(
        train={
            "learning_rate_scale": 1e30,
            "max_minutes_between_checkpoints": 1e-6,
            "log_every": 100,
        }
    )
    with pytest.raises(DivergedError, match=r"development set is nan.*--train.learning-rate-scale"):
        train(wild, tmp_path / "run")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state_of(tmp_path / "run")[1]))
    assert not scores_of(tmp_path / "run")


def test_a_full_device_is_one_line_with_commands_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(loop.CompiledStep, "__call__", full)
        with pytest.raises(OutOfMemoryError) as caught:
            train(SMALL, tmp_path / "run")
    told = str(caught.value)
    assert "\n" not in told
    command = told.split("`transformer-jax ")[1].split("`")[0].split()
    assert command[-2:] == ["--train.gradient-accumulation-steps", "2"]
    assert "--model.remat" in told
    assert main([*command, "--model.remat"]) == 0
    assert f"run kept in {tmp_path / 'run'}" in capsys.readouterr().out


def test_fewer_steps_than_were_done_are_refused(whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.steps must be at least 8, .* got 7"):
        resume(whole, train={"steps": 7})
    assert RunDirectory.open(whole).config.train.steps == 8


def test_a_run_that_begins_with_another_is_there_with_its_parameters_or_not_at_all(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.CheckpointManager, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        create_run(SMALL, tmp_path / "next", QUIET, init_from=whole)
    assert not list(tmp_path.iterdir())


def test_commands_named_at_the_end_of_a_short_run_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    Path("mine.py").write_text("from small import SMALL as CONFIG\n")
    short = ["--train.steps", "2", "--decode.average_checkpoints", "3"]
    assert main(["train", "mine.py", *short]) == 0
    told = capsys.readouterr().out.split("next: transformer-jax ")[1].splitlines()[0]
    assert main(["evaluate", "runs/mine"]) == 2
    assert "--average-checkpoints 1" in capsys.readouterr().err
    assert main([*told.split(), "--split", "dev"]) == 0


def test_other_text_than_the_run_began_with_is_refused(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    description = json.loads((copy / "run.json").read_text())
    description["data"]["fingerprint"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="not the text that the run began with"):
        resume(copy, train={"steps": 9})


def test_a_checkpoint_of_another_model_is_refused(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    description = json.loads((copy / "run.json").read_text())
    description["config"]["model"]["d_ff"] = 48
    (copy / "run.json").write_text(json.dumps(description))
    with pytest.raises(StorageError, match=r"another run: model.d_ff 32 -> 48"):
        transformer_jax.load(copy)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_75(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "long.py").write_text(
        "from small import SMALL\nCONFIG = SMALL.change(train={'steps': 100000})\n"
    )
    command = [sys.executable, "-m", "transformer_jax", "train", "long.py", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75
    assert told.strip().endswith("`transformer-jax resume run`")
    assert len(told.strip().splitlines()) == 1
    step, _ = state_of(tmp_path / "run")
    assert f"{number.name}: saved at step {step};" in told


def test_the_command_line_trains_resumes_and_names_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    Path("mine.py").write_text("from small import SMALL as CONFIG\n")
    assert main(["train", "mine.py", "--train.steps", "2"]) == 0
    assert "next: transformer-jax evaluate runs/mine" in capsys.readouterr().out
    assert main(["train", "mine.py"]) == 2
    told = capsys.readouterr().err
    assert "transformer-jax resume runs/mine" in told
    assert "--out runs/mine-2" in told
    assert main(["resume", "runs/mine", "--train.steps", "3"]) == 0
    assert state_of(Path("runs/mine"))[0] == 3
    assert main(["resume", "runs/mine", "--model.d-k", "4"]) == 2
    assert "model.d_k 8 -> 4" in capsys.readouterr().err


def test_a_run_takes_no_other_text_for_its_own_though_the_cache_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    pairs = list(NumberWords(60).read("train"))
    for place, dev in (("texts", pairs[:5]), ("moved", pairs[:5]), ("other", pairs[5:9])):
        Path(place).mkdir()
        for name, lines in (("train", pairs), ("dev", dev)):
            for language, side in zip(("en", "de"), zip(*lines, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in side)
                Path(place, f"{name}.{language}").write_text(text, "utf-8")
    files = {"train": ("train.en", "train.de"), "dev": ("dev.en", "dev.de"), "folder": "texts"}
    config = SMALL.change(data={"corpus": "text", **files}, train={"steps": 1})
    path = Path("run")
    create_run(config, path, Console(quiet=True))

    for options, told in (
        (["--data.folder", "other"], "is not the text that the run began with"),
        (["--data.dev", "dev.en", "nowhere.de"], "there is no file texts/nowhere.de"),
    ):
        assert main(["resume", "run", *options]) == 65
        assert told in capsys.readouterr().err
        assert RunDirectory.open(path).config.data.folder == "texts"
    assert main(["resume", "run", "--data.folder", "moved"]) == 0
    assert RunDirectory.open(path).config.data.folder == "moved"


def dev_reports(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metrics_of(path) if line["split"] == "dev"}


def test_checkpoints_can_be_counted_in_epochs_and_translated_now_and_then(tmp_path: Path) -> None:
    train_config = {"checkpoint_unit": "epoch", "checkpoint_every": 2, "bleu_every": 2}
    config = SMALL.change(data={"batch_tokens": 2048}, train=train_config | {"steps": 40})
    folder = create_run(config, tmp_path / "run", QUIET)
    epoch = loop.Training(folder, QUIET).batches.per_epoch
    last = 9 * epoch
    scheduled = loop.run_training(
        folder.with_config(config.change(data={"vocab_size": 64}, train={"steps": last})), QUIET
    )
    reports = dev_reports(folder.path)
    assert list(reports) == [*range(2 * epoch, last, 2 * epoch), last]
    translated = [step for step, values in reports.items() if "bleu" in values]
    assert translated == [4 * epoch, 8 * epoch, last]
    # The three that are kept; the last step is on no schedule.
    assert scheduled == 3
    assert sorted(scores_of(folder.path))[-1] == 8 * epoch


def test_patience_ends_a_run_that_gets_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The best at step 2: three worse ones after it, although each is better than the one before.
    found = {1: 9.0, 2: 5.0, 3: 7.0, 4: 6.0, 5: 5.5, 6: 5.4, 7: 5.3, 8: 5.2}
    steps = itertools.count(1)
    monkeypatch.setattr(loop, "perplexity", lambda *_: found[next(steps)])
    config = SMALL.change(train={"checkpoint_every": 1, "patience": 3, "keep_checkpoints": 1})
    path = train(config, tmp_path / "run")
    assert list(dev_reports(path)) == [1, 2, 3, 4, 5]
    assert resume(path) == path
    assert state_of(path)[0] == 5
    resume(path, train={"patience": 5})
    assert list(dev_reports(path)) == [1, 2, 3, 4, 5, 6, 7]


def test_source_and_target_may_have_vocabularies_of_their_own(tmp_path: Path) -> None:
    config = SMALL.change(data={"vocab_size": 48, "source_vocab_size": 56}, train={"steps": 2})
    path = train(config, tmp_path / "run")
    run = transformer_jax.load(path)
    assert (len(run.vocabulary.source), len(run.vocabulary.target)) == (56, 48)
    assert run.params["source_embedding"]["table"].shape == (56, 16)
    assert run.params["embedding"]["table"].shape == (48, 16)
    # English letters are in one, German umlauts in the other alone.
    umlaut = "fünf"
    assert run.vocabulary.target.decode(run.vocabulary.target.encode([umlaut])) == [umlaut]
    assert run.vocabulary.source.decode(run.vocabulary.source.encode([umlaut])) != [umlaut]
    assert len(run.translate(["one", "two"])) == 2
    resume(path, train={"steps": 3})
    assert state_of(path)[0] == 3
    follower = create_run(config, tmp_path / "next", QUIET, init_from=path)
    assert follower.vocabulary.source.model == run.vocabulary.source.model


def compiled_by(action: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names of the programs that are compiled meanwhile, each as often as it is."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        action()
    found = [re.match(r"Compiling (\S+) with", record.getMessage()) for record in caplog.records]
    return [match[1] for match in found if match]


def test_a_step_is_compiled_once_for_each_shape_and_nothing_in_later_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = create_run(SMALL, tmp_path / "run", QUIET)
    training = loop.Training(folder, QUIET)
    batches, said = training.batches, list[str]()
    assert len(batches.buckets) > 1
    meter = Meter(training.model, 1e9, [])
    step = CompiledStep(
        make_train_step(training.model, SMALL.train), training.placement, said.append, meter.paused
    )
    state = training.placement.place_state(init_state(training.model, SMALL.train))

    def epoch(number: int) -> None:
        nonlocal state
        for place in range(number * batches.per_epoch, (number + 1) * batches.per_epoch):
            batch = batches.local_batch(place, training.placement.shard)
            state, metrics = step(state, batch)
            meter.add(metrics, batch)

    compiled = compiled_by(lambda: epoch(0), caplog)
    shapes = len(batches.buckets)
    assert len(said) == shapes
    assert compiled.count("jit(train_step)") == shapes, compiled
    # From here on no shape is new; nor may anything else be compiled between two steps, or go
    # from host to device or back, but what is sent on purpose.
    with jax.transfer_guard("disallow"):
        assert compiled_by(lambda: epoch(1), caplog) == []
        # So that the test can fail.
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            jax.jit(jnp.negative)(np.ones(3))
    assert compiled_by(lambda: jax.jit(lambda x: x + 3)(1), caplog)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder for compiled programs, at first empty, in which every one is kept."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_runs_of_all_seeds_share_their_programs(tmp_path: Path, programs: Path) -> None:
    def kept() -> set[str]:
        return {path.name for path in programs.glob("*-cache")}

    # An epoch, so that each shape is met, by each seed in another order.
    config = SMALL.change(train={"steps": 4})
    train(config, tmp_path / "one")
    first = kept()
    assert sum("train_step" in name for name in first) > 1
    train(config.change(train={"seed": 1}), tmp_path / "two")
    assert kept() == first
    train(config.change(train={"seed": 2, "steps": 1}), tmp_path / "three")
    # What is read back is another program than what is drawn, but the steps are the same.
    resume(tmp_path / "three", train={"steps": 4})
    assert {name for name in kept() - first if "train_step" in name} == set()


def test_a_trace_of_some_steps_changes_no_bit(whole: Path, tmp_path: Path) -> None:
    path = train(SMALL.change(train={"profile": 3}), tmp_path / "run")
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)
    assert not (whole / "profile").exists()
    # One for TensorBoard, one for Perfetto.
    assert list(path.glob("profile/plugins/profile/*/*.xplane.pb"))
    [trace] = path.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = " ".join(event.get("name", "") for event in events)
    # The step, and what the device does in it.
    assert "train_step" in names
    assert "fusion" in names
    # Another run goes on with it, and one that ends before its time keeps what there is.
    resume(path, train={"steps": 11, "profile": 100})
    assert len(list(path.glob("profile/plugins/profile/*"))) == 2


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = create_run(SMALL.change(train={"profile": 1}), tmp_path / "run", QUIET)
    (folder.path / "profile").touch()
    with pytest.raises(StorageError, match="profile cannot be made"):
        loop.run_training(folder, QUIET)
