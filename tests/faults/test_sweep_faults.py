"""Test that a sweep ends in the same bits if its launcher is killed, or if two launchers run it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_configs import SMALL, metrics_of
from training_runs import assert_same, scores_of, state_of

from transformer_jax.config import Row
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import read_status

# On a busy machine, tests that start many processes take longer than the default timeout.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]
# Without a test set, each run has only two phases.
CONFIG = SMALL.change(train={"steps": 24, "checkpoint_every": 12}, data={"test": None})
NUM_SEEDS = 2
NUM_PAIRS = 3


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the command that trains the sweep."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(CONFIG.to_dict()))
    command = [sys.executable, "-m", "transformer_jax", "sweep", str(config), "--out", str(folder)]
    command += ["--seeds", str(NUM_SEEDS), "--devices", "1", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def read_log(folder: Path) -> str:
    return folder.with_suffix(".log").read_text("utf-8")


def runs_of(folder: Path) -> list[SweepRun]:
    return list(plan_sweep(folder, {folder.name: Row(CONFIG)}, NUM_SEEDS).runs)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Wait until a condition holds; return False if the process ends first."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def assert_equal(folder: Path, undisturbed: Path) -> None:
    """Check that two finished sweeps have the same states, metrics (except times), and scores."""
    for run, expected in zip(Sweep.open(folder).runs, Sweep.open(undisturbed).runs, strict=True):
        status = read_status(run)
        assert status.status == "done", (status.summary, read_log(folder))
        assert status.finished == ("train", "dev")
        assert_same(state_of(run.path), state_of(expected.path))
        assert metrics_of(run.path) == metrics_of(expected.path)
        assert scores_of(run.path) == scores_of(expected.path)
        assert status.scores["dev"]["bleu"] == read_status(expected).scores["dev"]["bleu"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "mine"
    assert start(folder).wait() == 0, read_log(folder)
    return folder


# A sweep reaches these moments in this order.
MOMENTS: dict[str, Callable[[SweepRun, SweepRun], bool]] = {
    "the plan is stored": lambda first, _: first.config_file.exists(),
    "a worker starts": lambda first, _: first.status_file.exists(),
    "a run is created": lambda first, _: (first.path / "run.json").exists(),
    "a run trains": lambda first, _: (first.path / "metrics.jsonl").exists(),
    "a run is scored": lambda first, _: "train" in read_status(first).finished,
    "the next run trains": lambda _, second: (second.path / "metrics.jsonl").exists(),
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.trials("a sweep whose launcher is killed or interrupted", len(MOMENTS))
def test_a_sweep_whose_launcher_is_killed_at_any_moment_ends_in_the_same_bits(
    number: signal.Signals, undisturbed: Path, tmp_path: Path
) -> None:
    folder, rng = tmp_path / "mine", random.Random(number)
    for moment, is_reached in MOMENTS.items():
        process = start(folder)
        log, runs = read_log(folder), runs_of(folder)
        assert wait_until(lambda: is_reached(*runs), process), (moment, read_log(folder))  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(number)
        code = process.wait()
        # A signal that arrives before Python has started ends the process without a message.
        is_silent = number == signal.SIGKILL or read_log(folder) == log
        # The workers of a killed launcher may finish the sweep before the next signal.
        assert code in (-number if is_silent else 75, 0), (moment, read_log(folder))
    assert start(folder).wait() == 0, read_log(folder)
    assert "Traceback" not in read_log(folder)
    assert_equal(folder, undisturbed)


@pytest.mark.parametrize("pair", range(NUM_PAIRS))
@pytest.mark.trials("two commands that run one sweep concurrently")
def test_two_commands_that_run_one_sweep_at_once_end_in_the_same_bits(
    pair: int, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    first = start(folder)
    if pair:
        # The second command starts while the first one plans the sweep or trains.
        moment = ("the plan is stored", "a run trains")[pair - 1]
        assert wait_until(lambda: MOMENTS[moment](*runs_of(folder)), first), read_log(folder)
    second = start(folder)
    assert [first.wait(), second.wait()] == [0, 0], read_log(folder)
    assert "Traceback" not in read_log(folder)
    assert_equal(folder, undisturbed)
    # Each run was trained once.
    for run in runs_of(folder):
        assert run.log_file.read_text("utf-8").count("step 24/24  dev") == 1
