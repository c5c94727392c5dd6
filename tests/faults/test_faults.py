"""Test that killed, interrupted, and damaged runs reproduce uninterrupted runs bit for bit."""

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

import pytest
from example_configs import SMALL, metrics_of
from processes import Forks
from training_runs import assert_same, scores_of, share_compiled_steps, state_of, train
from zygote import MOMENTS

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.config import Row
from transformer_jax.runs.lock import describe_holder
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.signals import STOP_SIGNALS
from transformer_jax.sweeps.joint import train_runs
from transformer_jax.sweeps.plan import NAME_SEPARATOR, plan_sweep

# The run exercises dropout, gradient accumulation, the learning-rate peak, and epoch boundaries.
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
# On a busy machine, tests that start many processes take longer than the default timeout.
pytestmark = pytest.mark.timeout(3600)
NUM_KILLS = int(os.environ.get("TRANSFORMER_JAX_KILLS", "15"))
# The number of signals of each kind.
NUM_SIGNALS = 5


@dataclasses.dataclass
class Trainer:
    """A helper that forks training processes in a folder and reads their output."""

    forks: Forks
    folder: Path

    def start(self, *arguments: str, die: str | None = None) -> int:
        """Start a command that may kill itself at one of `MOMENTS`, and return its process ID."""
        # A killed process may leave a partial file in the cache, so do not use the shared cache.
        programs = str(self.folder / "programs")
        return self.forks.start(*arguments, log=self.folder / "log", programs=programs, die=die)

    def train(self, path: Path, die: str | None = None) -> int:
        """Start or resume a run, and return the process ID."""
        if (path / "run.json").exists():
            return self.start("resume", str(path), die=die)
        return self.start("train", str(self.folder / "config.json"), "--out", str(path), die=die)

    def wait(self, pid: int) -> int:
        """Wait for a process; return its exit code, or -N if signal N killed it."""
        return self.forks.wait(pid)

    def read_log(self) -> str:
        """Return everything that the processes have printed since the last call to this method."""
        log = self.folder / "log"
        text = log.read_text("utf-8") if log.exists() else ""
        log.unlink(missing_ok=True)
        return text

    def finish(self, path: Path) -> None:
        """Start or resume a run in this process, and check that it ends successfully."""
        if (path / "run.json").exists():
            assert main(["resume", str(path)]) == 0
        else:
            assert main(["train", str(self.folder / "config.json"), "--out", str(path)]) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The path to an uninterrupted run. Later runs in this process reuse its compiled steps."""
    with share_compiled_steps():
        yield train(CONFIG, tmp_path_factory.mktemp("faults") / "undisturbed")


@pytest.fixture(scope="module")
def trainer(forks: Forks, undisturbed: Path) -> Trainer:
    folder = undisturbed.parent
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    # Let the other runs use the programs that the uninterrupted run compiled.
    link_programs(folder)
    return Trainer(forks, folder)


def link_programs(folder: Path) -> Path:
    """Return a copy of the compilation cache, because a killed process may leave a partial file."""
    programs = folder / "programs"
    programs.mkdir()
    for program in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).iterdir():
        (programs / program.name).symlink_to(program)
    return programs


def newest_step(path: Path) -> int:
    return RunFolder.open(path).steps_done if (path / "run.json").exists() else 0


def assert_equal(path: Path, undisturbed: Path) -> None:
    """Check that two finished runs have the same state, metrics (except times), and samples."""
    assert state_of(path)[0] == CONFIG.train.steps
    assert_same(state_of(path), state_of(undisturbed))
    assert metrics_of(path) == metrics_of(undisturbed)
    for name in ("checkpoints", "samples"):
        left, right = (sorted(p.name for p in (x / name).iterdir()) for x in (path, undisturbed))
        assert left == right
    for sample in (path / "samples").iterdir():
        assert sample.read_bytes() == (undisturbed / "samples" / sample.name).read_bytes()
    assert not [p for p in path.parent.iterdir() if p.name.startswith(f".{path.name}")]


def events_of(path: Path) -> list[tuple[str, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return [(tag, e.step) for tag in events.Tags()["tensors"] for e in events.Tensors(tag)]


# The next test is faster, because it kills a run only once.
@pytest.mark.exhaustive
@pytest.mark.trials("SIGKILL at a random time", NUM_KILLS)
def test_a_run_that_is_killed_at_random_times_ends_in_the_same_bits(
    trainer: Trainer, undisturbed: Path
) -> None:
    rng, num_kills = random.Random(NUM_KILLS), NUM_KILLS
    num_killed = num_runs = 0
    while num_killed < num_kills:
        num_runs += 1
        path = trainer.folder / f"killed-{num_kills}-{num_runs}"
        for _ in range(min(5, num_kills - num_killed)):
            pid = trainer.train(path)
            # The random delays range from process startup to the last training steps.
            time.sleep(rng.uniform(0, 6))
            os.kill(pid, signal.SIGKILL)
            num_killed += trainer.wait(pid) == -signal.SIGKILL
        trainer.finish(path)
        assert_equal(path, undisturbed)
        assert sorted(events_of(path)) == sorted(events_of(undisturbed))
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [["after the rename"], pytest.param(sorted(MOMENTS), marks=pytest.mark.exhaustive)],
    ids=["one", "all"],
)
@pytest.mark.trials("SIGKILL at a stage of a save", "moments")
def test_a_kill_at_any_moment_of_a_save_loses_at_most_one_interval(
    moments: list[str], trainer: Trainer, undisturbed: Path
) -> None:
    for moment in moments:
        path = trainer.folder / "moment"
        assert trainer.wait(trainer.train(path, die=moment)) == -signal.SIGKILL, moment
        # Every remaining checkpoint must still be intact.
        names = (p.name for p in (path / "checkpoints").iterdir())
        steps = [int(name) for name in names if name.isdecimal()]
        assert steps, moment
        for step in steps:
            transformer_jax.load(path, average_checkpoints=1, step=step)
        trainer.finish(path)
        assert_equal(path, undisturbed)
        shutil.rmtree(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.trials("a signal at a random time", NUM_SIGNALS)
def test_a_signal_at_any_time_loses_no_step(
    number: signal.Signals, trainer: Trainer, undisturbed: Path
) -> None:
    rng = random.Random(number)
    path = trainer.folder / f"signal-{number}"
    for _ in range(NUM_SIGNALS):
        trainer.read_log()
        pid = trainer.train(path)
        # Wait until the process locks the run, because there is no run to resume before that.
        while not describe_holder(path):
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 4))
        os.kill(pid, number)
        exit_code = trainer.wait(pid)
        if exit_code == 0:
            # The run ended before the signal arrived, so start a new run.
            assert_equal(path, undisturbed)
            shutil.rmtree(path)
            continue
        message = trainer.read_log().splitlines()[-1]
        assert exit_code == 75, message
        assert f"transformer-jax resume {path}" in message
        if "saved at step" in message:
            assert f"saved at step {newest_step(path)};" in message
    trainer.finish(path)
    assert_equal(path, undisturbed)


@pytest.mark.slow
@pytest.mark.trials("a signal during an evaluation")
def test_a_signal_during_an_evaluation_is_answered_before_the_next_batch(
    trainer: Trainer, undisturbed: Path
) -> None:
    trainer.read_log()
    path = trainer.folder / "evaluation"
    # Only an evaluation with a search reports translated batches. The last evaluation is the first
    # one with a search.
    assert trainer.wait(trainer.train(path, die="SIGTERM")) == 75
    message = trainer.read_log().splitlines()[-1]
    assert f"SIGTERM: saved at step 60; resume with `transformer-jax resume {path}`" in message
    assert newest_step(path) == 60
    assert max(scores_of(path)) == 40
    trainer.finish(path)
    assert_equal(path, undisturbed)
    assert scores_of(path) == scores_of(undisturbed)


@pytest.mark.exhaustive
@pytest.mark.trials("a kill every few seconds")
def test_every_start_that_writes_a_checkpoint_gets_further_than_the_one_before(
    trainer: Trainer, undisturbed: Path
) -> None:
    path = trainer.folder / "storm"
    step_before, num_fruitless, seconds = 0, 0, 2.0
    for _ in range(8):
        trainer.read_log()
        pid = trainer.train(path)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        # The run may end before it is killed.
        if trainer.wait(pid) == 0:
            step_before = newest_step(path)
            break
        has_reported = "step " in trainer.read_log()
        step = newest_step(path)
        # A checkpoint that is still being written has a name that begins with a dot.
        is_written = not [*path.glob("checkpoints/.*")]
        num_fruitless += has_reported and is_written and step <= step_before
        # On a busy machine, a run takes longer to reach its first step and to write it. Wait longer
        # before killing the next attempt.
        seconds *= 1 if step > step_before else 1.5
        step_before = step
    assert step_before > 1
    assert not num_fruitless
    trainer.finish(path)
    assert_equal(path, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.trials("four processes that start the same run")
def test_if_several_processes_start_at_once_one_trains_and_the_others_report_it(
    trainer: Trainer, undisturbed: Path
) -> None:
    count = 4
    path = trainer.folder / "one"
    trainer.read_log()
    for arguments in (["train", str(trainer.folder / "config.json"), "--out"], ["resume"]):
        steps = "40" if arguments[0] == "train" else "60"
        pids = [trainer.start(*arguments, str(path), "--train.steps", steps) for _ in range(count)]
        exit_codes = [trainer.wait(pid) for pid in pids]
        log = trainer.read_log()
        assert sorted(exit_codes) == [0, *[2] * (count - 1)], log
        messages = [line for line in log.splitlines() if line.startswith("transformer-jax: ")]
        assert len(messages) == count - 1
        # A process that starts after the run is created, but before it is locked, reports that the
        # run already exists.
        known = ("is being trained by", "already exists")
        assert all(any(text in message for text in known) for message in messages), messages
    assert_same(state_of(path), state_of(undisturbed))


@pytest.mark.slow
@pytest.mark.trials("a damaged checkpoint")
def test_a_damaged_checkpoint_costs_one_interval_and_one_line(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(undisturbed, path)
    array = max((path / "checkpoints" / "60").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(array.read_bytes())
    content[100] ^= 1
    array.write_bytes(content)
    assert main(["resume", str(path)]) == 0
    log = "".join(capsys.readouterr())
    assert "checkpoint 60 is damaged" in log
    assert "bad-60" in log
    assert "checkpoint 40 is used instead" in log
    shutil.rmtree(path / "checkpoints" / "bad-60")
    assert_equal(path, undisturbed)
    for step in (path / "checkpoints").iterdir():
        (step / "SHA256SUMS").unlink()
    before = sorted(path.rglob("*"))
    assert main(["resume", str(path)]) == 74
    assert "every checkpoint of " in capsys.readouterr().err
    assert sorted(path.rglob("*")) == before


@pytest.mark.slow
def test_a_killed_group_of_runs_resumes_in_the_same_bits(tmp_path: Path) -> None:
    sweeps = [plan_sweep(tmp_path / name, {"base": Row(SMALL)}, 3) for name in ("a", "b")]
    for sweep in sweeps:
        sweep.store()
    killed, undisturbed = (list(sweep.runs) for sweep in sweeps)
    # The process dies when one run is about to get ahead of the others.
    code = (
        "import pathlib, sys; from zygote import die_after\n"
        "die_after(pathlib.Path, 'rename', 'checkpoints/.', count=4)\n"
        "from transformer_jax.sweeps import joint; joint.main(*sys.argv[1:])"
    )
    programs = link_programs(tmp_path)
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(programs)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    names = NAME_SEPARATOR.join(run.name for run in killed)
    command = [sys.executable, "-c", code, str(tmp_path / "a"), names]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = [newest_step(run.path) for run in killed]
    assert 0 < min(steps) <= max(steps) < SMALL.train.steps
    for runs in (killed, undisturbed):
        train_runs(runs, os.getpid())
    for run, expected in zip(killed, undisturbed, strict=True):
        assert_same(state_of(run.path), state_of(expected.path))
        assert metrics_of(run.path) == metrics_of(expected.path)
        assert scores_of(run.path) == scores_of(expected.path)
        assert RunFolder.open(run.path).group == 3


def contents_of(path: Path) -> dict[str, bytes]:
    """Return the contents of a run's files, except for evaluations and the lock."""
    files = (x for x in sorted(path.rglob("*")) if x.is_file() and x.name != "lock")
    contents = {str(x.relative_to(path)): x.read_bytes() for x in files}
    return {name: x for name, x in contents.items() if not name.startswith("evaluations/")}


@pytest.mark.exhaustive
@pytest.mark.trials("a kill while a run is scored, packaged, or exported", "num_readers")
@pytest.mark.parametrize("num_readers", [4])
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "--average-checkpoints", "2"),
        ("package", "--license", "mit", "--out", "OUT"),
        ("export", "--format", "safetensors", "--out", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_a_killed_reader_leaves_the_run_intact_and_succeeds_afterward(
    command: tuple[str, ...], num_readers: int, trainer: Trainer, undisturbed: Path
) -> None:
    path = trainer.folder / f"read-by-{command[0]}"
    shutil.copytree(undisturbed, path)
    shutil.rmtree(path / "evaluations", ignore_errors=True)
    before = contents_of(path)
    out = trainer.folder / f"written-by-{command[0]}"
    name, *options = (str(out) if word == "OUT" else word for word in command)
    rng = random.Random(name)
    for _ in range(num_readers):
        pid = trainer.start(name, str(path), *options)
        time.sleep(rng.uniform(0, 3))
        os.kill(pid, signal.SIGKILL)
        trainer.wait(pid)
        assert contents_of(path) == before
        # A folder that exists is complete: the command writes it elsewhere and renames it.
        if out.exists():
            assert (out / "run.json").exists()
            shutil.rmtree(out)
    assert main([name, str(path), *options]) == 0
    assert contents_of(path) == before
    for folder in (path, out):
        shutil.rmtree(folder, ignore_errors=True)
