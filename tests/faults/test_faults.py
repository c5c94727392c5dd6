"""Whatever happens to a process, the run ends in the bits of one to which nothing happened."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import SMALL, metrics_of
from zygote import MOMENTS

import transformer_jax
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.lock import describe_holder
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.training.step import init_state

TESTS = Path(__file__).parents[1]
# Dropout, gradient-accumulation-steps, the rate's peak and the end of an epoch (16 steps) are all on the way.
CONFIG = SMALL.change(
    train={
        "steps": 60,
        "warmup_steps": 20,
        "checkpoint_every": 20,
        "bleu_every": 3,
        "keep_checkpoints": 2,
        "log_every": 3,
        "gradient_accumulation_steps": 2,
    },
    decode={"beam_size": 2},
)
KILLS = int(os.environ.get("TRANSFORMER_JAX_KILLS", "50"))


@dataclasses.dataclass
class Zygote:
    """Starts trainers that cost no imports, in the order in which they are asked for."""

    process: subprocess.Popen[str]
    folder: Path

    def ask(self, request: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *arguments: str, die: str | None = None) -> int:
        """Return the process id."""
        return self.ask({"arguments": arguments, "log": str(self.folder / "log"), "die": die})

    def end_of(self, pid: int) -> int:
        """Return how a process ended: its exit code, or minus the signal's number."""
        return self.ask(pid)

    def said(self) -> str:
        """Return what all of them have said since this was asked last."""
        log = self.folder / "log"
        text = log.read_text("utf-8") if log.exists() else ""
        log.unlink(missing_ok=True)
        return text


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder = tmp_path_factory.mktemp("zygote")
    (folder / "config.py").write_text("from test_faults import CONFIG\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with subprocess.Popen(
        [sys.executable, str(TESTS / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Zygote(process, folder)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote) -> Path:
    """The run to which nothing happened."""
    path = zygote.folder / "undisturbed"
    assert zygote.end_of(start(zygote, path)) == 0
    return path


def start(zygote: Zygote, path: Path, die: str | None = None) -> int:
    """Begin a run, or go on with it."""
    if (path / "run.json").exists():
        return zygote.start("resume", str(path), die=die)
    return zygote.start("train", str(zygote.folder / "config.py"), "--out", str(path), die=die)


def newest(path: Path) -> int:
    return RunDirectory.open(path).steps_done if (path / "run.json").exists() else 0


def state_of(path: Path) -> tuple[int, Any]:
    """Return parameters and optimizer of the newest checkpoint."""
    run = transformer_jax.load(path, average_checkpoints=1)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: init_state(run.model, run.config.train))
    parts = {"params": shapes.params, "optimizer": shapes.optimizer}
    with CheckpointManager(path / "checkpoints", run.folder.identity) as checkpoints:
        return run.step, checkpoints.restore(run.step, on_device(parts, here))


def assert_equal(path: Path, undisturbed: Path) -> None:
    """Compare all that a run leaves behind, but for the clock."""
    step, state = state_of(path)
    expected_step, expected = state_of(undisturbed)
    assert step == expected_step == CONFIG.train.steps
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert metrics_of(path) == metrics_of(undisturbed)
    for name in ("checkpoints", "samples"):
        mine, theirs = (sorted(p.name for p in (x / name).iterdir()) for x in (path, undisturbed))
        assert mine == theirs, "something was left over, or is missing"
    for sample in (path / "samples").iterdir():
        assert sample.read_bytes() == (undisturbed / "samples" / sample.name).read_bytes()
    assert not [p for p in path.parent.iterdir() if p.name.startswith(f".{path.name}")]


def events_of(path: Path) -> list[tuple[str, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return [(tag, e.step) for tag in events.Tags()["tensors"] for e in events.Tensors(tag)]


@pytest.mark.parametrize("kills", [2, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits(
    kills: int, zygote: Zygote, undisturbed: Path
) -> None:
    rng = random.Random(kills)
    held = runs = 0
    while held < kills:
        runs += 1
        path = zygote.folder / f"killed-{kills}-{runs}"
        for _ in range(min(5, kills - held)):
            pid = start(zygote, path)
            # From the imports' end to a few seconds of training.
            time.sleep(rng.uniform(0, 6))
            os.kill(pid, signal.SIGKILL)
            held += zygote.end_of(pid) == -signal.SIGKILL
        while (code := zygote.end_of(start(zygote, path))) != 0:
            raise AssertionError(f"exit {code}: {zygote.said()}")
        assert_equal(path, undisturbed)
        assert sorted(events_of(path)) == sorted(events_of(undisturbed))
        shutil.rmtree(path)


QUICK = ["after the rename"]


@pytest.mark.parametrize(
    "moments", [QUICK, pytest.param(sorted(MOMENTS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_kill_at_any_moment_of_a_save_costs_one_interval_at_most(
    moments: list[str], zygote: Zygote, undisturbed: Path
) -> None:
    for moment in moments:
        path = zygote.folder / "moment"
        pid = start(zygote, path, die=moment)
        assert zygote.end_of(pid) == -signal.SIGKILL, moment
        # The first one, made at once, is there, whatever happened to the second.
        there = [int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdecimal()]
        assert there, moment
        for step in there:
            transformer_jax.load(path, average_checkpoints=1, step=step)
        assert zygote.end_of(start(zygote, path)) == 0, zygote.said()
        assert_equal(path, undisturbed)
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGTERM, 2),
        *(
            pytest.param(number, 20, marks=pytest.mark.slow)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        ),
    ],
)
def test_a_signal_at_any_time_loses_no_step(
    number: signal.Signals, times: int, zygote: Zygote, undisturbed: Path
) -> None:
    rng = random.Random(number)
    path = zygote.folder / f"signal-{number}"
    pid = start(zygote, path)
    for turn in range(times):
        # Before a run is held there is nothing to go on with.
        while not describe_holder(path):
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 4))
        os.kill(pid, number)
        asked = time.monotonic()
        code = zygote.end_of(pid)
        if code:
            assert code == 75, zygote.said()
            assert time.monotonic() - asked < 30
            told = zygote.said().splitlines()[-1]
            assert f"transformer-jax resume {path}" in told
            if "saved at step" in told:
                assert f"saved at step {newest(path)};" in told
        if code == 0 or turn == times - 1:
            assert zygote.end_of(start(zygote, path)) == 0
            assert_equal(path, undisturbed)
            shutil.rmtree(path)
        if turn < times - 1:
            pid = start(zygote, path)


@pytest.mark.slow
def test_every_start_that_reaches_a_step_gets_further_than_the_one_before(
    zygote: Zygote, undisturbed: Path
) -> None:
    path = zygote.folder / "storm"
    before, fruitless, pause = 0, 0, 5.0
    for _ in range(20):
        zygote.said()
        pid = start(zygote, path)
        time.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        if zygote.end_of(pid) == 0:
            break
        reached = "step " in zygote.said()
        after = newest(path)
        fruitless += reached and after <= before
        # On a busy machine it takes longer to begin.
        pause *= 1 if reached else 1.5
        before = after
    assert before > 1
    assert not fruitless
    assert zygote.end_of(start(zygote, path)) == 0
    assert_equal(path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("many", [3, 8])
def test_of_many_that_begin_at_once_one_trains_and_the_others_are_told(
    many: int, zygote: Zygote, undisturbed: Path
) -> None:
    path = zygote.folder / "one"
    zygote.said()
    for arguments in (["train", str(zygote.folder / "config.py"), "--out"], ["resume"]):
        more = ["--train.steps", "40" if arguments[0] == "train" else "60"]
        pids = [zygote.start(*arguments, str(path), *more) for _ in range(many)]
        codes = [zygote.end_of(pid) for pid in pids]
        said = zygote.said()
        assert sorted(codes) == [0, *[2] * (many - 1)], said
        told = [line for line in said.splitlines() if line.startswith("transformer-jax: ")]
        assert len(told) == many - 1
        # Who looks in the moment between its making and its first trainer finds it there already.
        assert all("is being trained by" in x or "already exists" in x for x in told), told
    jax.tree.map(np.testing.assert_array_equal, state_of(path), state_of(undisturbed))


def test_a_damaged_checkpoint_costs_one_interval_and_one_line(
    zygote: Zygote, undisturbed: Path
) -> None:
    path = zygote.folder / "damaged"
    shutil.copytree(undisturbed, path)
    array = max((path / "checkpoints" / "60").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(array.read_bytes())
    content[100] ^= 1
    array.write_bytes(content)
    zygote.said()
    assert zygote.end_of(start(zygote, path)) == 0
    said = zygote.said()
    assert "checkpoint 60 is damaged and now called bad-60: " in said
    assert "40 is used instead" in said
    shutil.rmtree(path / "checkpoints" / "bad-60")
    assert_equal(path, undisturbed)
    for step in (path / "checkpoints").iterdir():
        (step / "SHA256SUMS").unlink()
    before = sorted(path.rglob("*"))
    assert zygote.end_of(start(zygote, path)) == 74
    assert "every checkpoint of " in zygote.said()
    assert sorted(path.rglob("*")) == before
