"""Test that runs that train in one program match runs that train alone, and end independently."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from example_configs import SMALL, metrics_of
from training_runs import QUIET, resume, scores_of, signal_at_step, state_of, train

from transformer_jax.config import Config
from transformer_jax.errors import (
    DivergedError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    TransformerJaxError,
)
from transformer_jax.files import read_json
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.checkpoint_metadata import DevScores
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.runs.metrics_file import read_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training import loop
from transformer_jax.training import member as members
from transformer_jax.training.create_run import create_run
from transformer_jax.training.evaluation import DevEvaluator
from transformer_jax.training.joint import JointStep
from transformer_jax.training.loop import train_together
from transformer_jax.training.member import Assignment, Member
from transformer_jax.training.step import TrainStep

Ends = dict[str, TransformerJaxError | None]
HINT = "repeat the sweep to resume"


def with_seed(seed: int, config: Config = SMALL) -> Config:
    """Return the config with a different seed."""
    return config.change(train={"seed": seed})


def create(folder: Path, seeds: Sequence[int] = (0, 1, 2), config: Config = SMALL) -> list[Path]:
    """Create a run for each seed, and return their paths."""
    paths = [folder / f"seed-{seed}" for seed in seeds]
    for path, seed in zip(paths, seeds, strict=True):
        create_run(with_seed(seed, config), path, QUIET)
    return paths


def train_all(paths: Sequence[Path], **sections: dict[str, Any]) -> Ends:
    """Train runs in one program, and return the errors that ended them, keyed by run name."""
    ends: Ends = {}
    assignments = []
    for path in paths:
        folder = RunFolder.open(path)
        folder = folder.with_config(folder.config.change(**sections))
        assignments.append(
            Assignment(folder, QUIET, on_end=lambda e, name=path.name: ends.update({name: e}))
        )
    train_together(assignments, HINT)
    return ends


def assert_close(path: Path, expected: Path) -> None:
    """Check that two runs have the same state and the same reports, apart from rounding."""
    (step, state), (expected_step, expected_state) = state_of(path), state_of(expected)
    assert step == expected_step
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), state, expected_state
    )
    reports, expected_reports = metrics_of(path), metrics_of(expected)
    assert [r["step"] for r in reports] == [r["step"] for r in expected_reports]
    for report, other in zip(reports, expected_reports, strict=True):
        keys = {"loss", "perplexity", "learning_rate"} & report.keys()
        expected_values = {key: other[key] for key in keys}
        assert {key: report[key] for key in keys} == pytest.approx(expected_values, rel=1e-3)
    assert scores_of(path) == pytest.approx(scores_of(expected), rel=1e-3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The paths to runs that trained separately, with seeds 0, 1, and 2."""
    folder = tmp_path_factory.mktemp("alone")
    return [train(with_seed(seed), folder / f"seed-{seed}") for seed in range(3)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The paths to runs that trained together in one program, with seeds 0, 1, and 2."""
    paths = create(tmp_path_factory.mktemp("together"))
    assert train_all(paths) == {"seed-0": None, "seed-1": None, "seed-2": None}
    return paths


def test_runs_that_train_together_match_runs_that_train_alone(
    alone: list[Path], together: list[Path]
) -> None:
    for path, expected in zip(together, alone, strict=True):
        assert_close(path, expected)
    first, second = (state_of(path)[1]["params"] for path in together[:2])
    assert any(
        not np.allclose(x, y)
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def test_runs_that_train_together_hold_their_states_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, have_copies = list[Member](), list[bool]()
    restore, call = Member.restore, loop.CompiledStep.__call__

    def restore_and_note(member: Member) -> None:
        trained.append(member)
        restore(member)

    def note_copies(step: Any, *args: Any) -> Any:
        have_copies.extend(hasattr(member, "state") for member in trained)
        return call(step, *args)

    monkeypatch.setattr(Member, "restore", restore_and_note)
    monkeypatch.setattr(loop.CompiledStep, "__call__", note_copies)
    paths = create(tmp_path, seeds=(0, 1))
    train_all(paths, train={"steps": 2})
    assert have_copies == [False] * 4


def test_a_run_records_how_many_runs_trained_in_its_program(
    alone: list[Path], together: list[Path]
) -> None:
    for path, group in ((together[1], 3), (alone[1], 1)):
        assert RunFolder.open(path).group == group
        assert read_json(path / "run.json").get("group", 1) == group


@pytest.mark.slow
def test_interrupted_runs_resume_together_or_alone(
    together: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create(tmp_path)
    with monkeypatch.context() as patch:
        signal_at_step(patch, 3, signal.SIGTERM)
        with pytest.raises(RunInterrupted, match=f"SIGTERM: saved at step 3; {HINT}"):
            train_all(paths)
    assert [state_of(path)[0] for path in paths] == [3, 3, 3]
    resume(paths[0])
    assert state_of(paths[0])[0] == 8
    assert train_all(paths) == {"seed-0": None, "seed-1": None, "seed-2": None}
    for path, expected in zip(paths, together, strict=True):
        assert_close(path, expected)
    assert RunFolder.open(paths[0]).group == 3


@pytest.mark.slow
def test_a_run_that_is_ahead_joins_when_the_others_reach_its_step(
    alone: list[Path], tmp_path: Path
) -> None:
    paths = create(tmp_path)
    resume(paths[1], train={"steps": 5})
    assert train_all(paths, train={"steps": 8}) == dict.fromkeys(("seed-0", "seed-1", "seed-2"))
    for path, expected in zip(paths, alone, strict=True):
        states = state_of(path), state_of(expected)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), *states)


@pytest.mark.slow
def test_runs_that_differ_in_numbers_match_runs_that_train_alone(tmp_path: Path) -> None:
    changes: dict[str, dict[str, dict[str, float]]] = {
        "base": {},
        "D2": {"model": {"dropout": 0.3}},
        "D4": {"train": {"label_smoothing": 0.3, "learning_rate_scale": 0.5, "warmup_steps": 6}},
    }
    configs = {name: SMALL.change(**sections) for name, sections in changes.items()}
    for name, config in configs.items():
        create_run(config, tmp_path / name, QUIET)
    assert train_all([tmp_path / name for name in configs]) == dict.fromkeys(configs)
    for name in ("D2", "D4"):
        assert_close(tmp_path / name, train(configs[name], tmp_path / f"{name}-alone"))
    losses = {json.dumps(metrics_of(tmp_path / name)[0]) for name in configs}
    assert len(losses) == 3


@pytest.mark.slow
def test_a_run_that_diverges_ends_alone(
    together: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create(tmp_path)
    compute = TrainStep.compute_gradients

    def make_infinite(self: TrainStep, state: Any, batch: Any) -> Any:
        gradients, loss = compute(self, state, batch)
        factor = jax.numpy.where(state.seed == 1, jax.numpy.nan, 1.0)
        return jax.tree.map(lambda x: x * factor, gradients), loss

    # Other tests share the programs of the step that is replaced here.
    monkeypatch.setattr(loop, "JointStep", JointStep)
    monkeypatch.setattr(TrainStep, "compute_gradients", make_infinite)
    monkeypatch.setattr(members, "MAX_SKIPPED_STEPS", 3)
    ends = train_all(paths)
    assert isinstance(ends.pop("seed-1"), DivergedError)
    assert ends == {"seed-0": None, "seed-2": None}
    assert (paths[1] / "diverged.json").exists()
    for index in (0, 2):
        assert_close(paths[index], together[index])


def test_a_run_that_cannot_save_or_is_locked_ends_alone(
    together: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create(tmp_path)
    save = CheckpointManager.prepare_save

    def run_out_of_space(self: CheckpointManager, step: int, *arguments: Any) -> None:
        if self.run.name == "seed-0" and step >= 4:
            raise StorageError("no room")
        save(self, step, *arguments)

    monkeypatch.setattr(CheckpointManager, "prepare_save", run_out_of_space)
    with exclusive_lock(paths[1]):
        ends = train_all(paths)
    assert str(ends["seed-0"]) == "no room"
    assert "is being trained by process" in str(ends["seed-1"])
    assert ends["seed-2"] is None
    assert_close(paths[2], together[2])


def test_the_device_time_of_runs_that_train_together_is_the_time_of_all_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, clock = create(tmp_path), SimpleNamespace(now=0.0)
    resume(paths[1], train={"steps": 4})
    restore, record = Member.restore, Member.record

    def restore_slowly(self: Member) -> None:
        restore(self)
        clock.now += 1000.0

    def record_slowly(self: Member, *arguments: Any) -> None:
        clock.now += 1.0
        record(self, *arguments)

    def read_clock() -> float:
        clock.now += 1e-6
        return clock.now

    fake = SimpleNamespace(perf_counter=read_clock)
    monkeypatch.setattr("transformer_jax.training.meter.time", fake)
    monkeypatch.setattr(members, "peak_flops", lambda _: 1e9)
    monkeypatch.setattr(Member, "restore", restore_slowly)
    monkeypatch.setattr(Member, "record", record_slowly)
    assert train_all(paths, train={"steps": 8}) == dict.fromkeys(("seed-0", "seed-1", "seed-2"))
    for path, restored in zip(paths, (0, 4, 0), strict=True):
        lines = read_metrics(path / "metrics.jsonl")
        reports = [x for x in lines if x["split"] == "train" and x["step"] > restored]
        seconds = sum(report["flops"] / report["utilization"] for report in reports) / 1e9
        assert seconds == pytest.approx(8 - restored, abs=0.1)


def test_a_lack_of_memory_to_score_one_run_ends_all_runs_and_they_resume_in_smaller_groups(
    together: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, evaluate = create(tmp_path), DevEvaluator.evaluate

    def run_out_of_memory(self: DevEvaluator, *arguments: Any, **options: Any) -> DevScores:
        if self._run.folder.path.name == "seed-1":
            raise OutOfMemoryError("too large")
        return evaluate(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(DevEvaluator, "evaluate", run_out_of_memory)
        with pytest.raises(OutOfMemoryError, match="too large"):
            train_all(paths)
    assert [state_of(path)[0] for path in paths] == [4, 4, 4]
    assert train_all(paths[:1]) == {"seed-0": None}
    assert train_all(paths[1:]) == {"seed-1": None, "seed-2": None}
    for path, expected in zip(paths, together, strict=True):
        assert_close(path, expected)


def test_early_stopping_ends_one_run_and_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SMALL.change(train={"patience": 1, "checkpoint_every": 2})
    paths = create(tmp_path, (0, 1), config)

    def score(self: DevEvaluator, state: Any, step: int, *, translate: bool) -> DevScores:
        assert state.step == step
        assert translate
        value = float(step) if self._run.folder.path.name == "seed-0" else 1 / step
        return DevScores(value, value)

    monkeypatch.setattr(DevEvaluator, "evaluate", score)
    assert train_all(paths) == {"seed-0": None, "seed-1": None}
    assert [state_of(path)[0] for path in paths] == [4, 8]
    assert [report["step"] for report in metrics_of(paths[0])] == [2, 4]
