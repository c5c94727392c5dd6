"""Test that two processes train like one process with two devices, and that they end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import metrics_of
from processes import Forks
from training_runs import assert_same

import transformer_jax
from transformer_jax.model.encoder_decoder import Params

SUPPORT = Path(__file__).parents[1] / "support"
STEPS, CHECKPOINT = 24, 12
# With FSDP, each of the two processes has only some of the parameters, so neither process can save
# or score the model alone.
CONFIG = f"""
from example_configs import SMALL
train = {{"steps": {STEPS}, "checkpoint_every": {CHECKPOINT}, "log_every": 1, "bleu_every": 9}}
CONFIG = SMALL.change(train=train | {{"parallelism": "fsdp"}})
"""


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(folder: Path, *command: str, code: str = "") -> subprocess.Popen[str]:
    """Start a command whose config file runs `code` on import."""
    (folder / "mine.py").write_text(CONFIG + code)
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_jax", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT.parents[1]}:{SUPPORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def options_of_two() -> list[list[str]]:
    """Return the command-line options for two processes that train together."""
    options = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    return [[*options, "--process-id", str(i)] for i in range(2)]


def start_two(folder: Path, *command: str, code: str = "") -> list[subprocess.Popen[str]]:
    return [start(folder, *command, *options, code=code) for options in options_of_two()]


def wait_for_end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return each process's exit code and standard error."""
    results = []
    for process in processes:
        _, stderr = process.communicate(timeout=600)
        results.append((process.returncode, stderr))
    return results


def assert_success(processes: list[subprocess.Popen[str]]) -> None:
    for exit_code, stderr in wait_for_end(processes):
        assert exit_code == 0, stderr


def wait_for_metrics(run: Path, processes: list[subprocess.Popen[str]]) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.exists() and metrics.stat().st_size):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def train_in_forks(
    forks: Forks, folder: Path, *options: Sequence[str], num_devices: int = 1
) -> Path:
    """Start one process for each list of options, wait for the run to end, and return its path."""
    (folder / "mine.py").write_text(CONFIG)
    command, log = ("train", "mine.py", "--out", "run"), folder / "log"
    settings: dict[str, Any] = {"folder": str(folder), "num_devices": num_devices}
    pids = [forks.start(*command, *more, log=log, **settings) for more in options]
    exit_codes = [forks.wait(pid) for pid in pids]
    assert not any(exit_codes), log.read_text("utf-8")
    return folder / "run"


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """The path to an uninterrupted run with two processes."""
    return train_in_forks(forks, tmp_path_factory.mktemp("processes"), *options_of_two())


def params_of(run: Path) -> Params:
    return transformer_jax.load(run, average_checkpoints=1).params


def assert_equal_runs(left: Path, right: Path) -> None:
    assert metrics_of(left) == metrics_of(right)
    assert_same(params_of(left), params_of(right))


@pytest.mark.slow
def test_two_processes_train_as_one_process_with_two_devices(
    run_of_two: Path, tmp_path: Path, forks: Forks
) -> None:
    runs = (run_of_two, train_in_forks(forks, tmp_path, [], num_devices=2))
    left, right = map(metrics_of, runs)
    # Only one process writes reports.
    assert [(r["step"], r["split"]) for r in left] == [(r["step"], r["split"]) for r in right]
    np.testing.assert_allclose(
        [r["perplexity"] for r in left], [r["perplexity"] for r in right], rtol=1e-6
    )
    # A report must count the FLOPs of all processes.
    assert [r.get("flops") for r in left] == [r.get("flops") for r in right]
    names = [sorted(path.name for path in run.iterdir()) for run in runs]
    assert names[0] == names[1]


@pytest.mark.exhaustive
def test_a_signal_to_one_process_ends_both_at_one_step_and_loses_nothing(
    run_of_two: Path, tmp_path: Path
) -> None:
    processes = start_two(tmp_path, "train", "mine.py", "--out", "run")
    wait_for_metrics(tmp_path / "run", processes)
    processes[1].send_signal(signal.SIGTERM)
    results = wait_for_end(processes)
    step = transformer_jax.load(tmp_path / "run", average_checkpoints=1).step
    assert step < STEPS
    for exit_code, stderr in results:
        assert exit_code == 75, stderr
        assert f"SIGTERM: saved at step {step};" in stderr
    assert_success(start_two(tmp_path, "resume", "run"))
    assert_equal_runs(run_of_two, tmp_path / "run")


# Both processes run this code. One of the processes calls `fail` in the chosen phase.
FAILURE = f"""
import os, signal, sys, time
from pathlib import Path
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import StorageError
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.sharding import DataParallel

def fail():
    {{failure}}

beat, busy, beats = heartbeat.beat, heartbeat.busy, 0
def count_phase(phase):
    global beats
    beats = 0
    busy(phase)
def fail_in_step(step):
    global beats
    beat(step)
    beats += 1
    while step == {CHECKPOINT + 1} and not Path("run/checkpoints/{CHECKPOINT}").exists():
        time.sleep(0.05)
    # The supervisors know how long a step takes after a few steps without another phase.
    if step > {CHECKPOINT} and beats > 6:
        fail()
save, find_text = CheckpointManager.save, RunFolder.find_text
to_local_device = DataParallel.to_local_device
def fail_in_save(self, step, *arguments, **options):
    save(self, step, *arguments, **options)
    if step == {CHECKPOINT}:
        fail()
def fail_in_evaluation(self, params):
    fail()
    return to_local_device(self, params)
def fail_at_start(self):
    fail()
    return find_text(self)

if sys.argv[-1] == "{{process}}":
    if "{{phase}}" == "step":
        heartbeat.beat, heartbeat.busy = fail_in_step, count_phase
    elif "{{phase}}" == "save":
        CheckpointManager.save = fail_in_save
    elif "{{phase}}" == "evaluation":
        DataParallel.to_local_device = fail_in_evaluation
    else:
        RunFolder.find_text = fail_at_start
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISE = "raise StorageError('the disk is gone')"


SUPERVISED = ("--supervise", "--step-timeout", "10")


def assert_both_end(folder: Path, process: int, phase: str, failure: str, exit_code: int) -> None:
    """Make one process fail in the given phase, and check how both processes end."""
    code = FAILURE.format(process=process, phase=phase, failure=failure)
    processes = start_two(folder, "train", "mine.py", "--out", "run", *SUPERVISED, code=code)
    results = wait_for_end(processes)
    assert [code for code, _ in results] == [exit_code, exit_code], results
    for _, stderr in results:
        last_line = stderr.splitlines()[-1]
        if exit_code == 74:
            assert last_line == "transformer-jax: the disk is gone"
        else:
            assert last_line.startswith("transformer-jax: ")
            assert last_line.endswith("`transformer-jax resume run`")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("process", "phase", "failure", "exit_code"),
    [
        (1, "step", KILL, 75),
        (0, "step", KILL, 75),
        (1, "save", KILL, 75),
        (1, "evaluation", KILL, 75),
        (1, "start", KILL, 75),
        (0, "save", RAISE, 74),
    ],
)
@pytest.mark.trials("one of two processes fails or hangs")
def test_if_one_process_fails_both_end_and_the_run_resumes_to_the_same_bits(
    process: int, phase: str, failure: str, exit_code: int, run_of_two: Path, tmp_path: Path
) -> None:
    assert_both_end(tmp_path, process, phase, failure, exit_code)
    assert_success(start_two(tmp_path, "resume", "run", *SUPERVISED))
    assert_equal_runs(run_of_two, tmp_path / "run")


# These failures leave behind the same files as those in the previous test.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("phase", "failure", "exit_code"),
    [
        ("step", STOP, 75),
        ("step", "time.sleep(1000)", 75),
        ("save", RAISE, 74),
        ("start", RAISE, 74),
    ],
)
@pytest.mark.trials("one of two processes fails or hangs")
def test_if_one_process_hangs_or_raises_an_error_both_end(
    phase: str, failure: str, exit_code: int, tmp_path: Path
) -> None:
    assert_both_end(tmp_path, 1, phase, failure, exit_code)


@pytest.mark.slow
def test_processes_with_different_options_end_with_the_names_of_the_options(
    run_of_two: Path, tmp_path: Path, forks: Forks
) -> None:
    first, second = options_of_two()
    more_steps = ["--train.steps", str(STEPS + 1)]
    logs = [tmp_path / "first", tmp_path / "second"]
    pids = [
        forks.start("resume", str(run_of_two), *options, log=log, output=os.devnull)
        for options, log in zip(([*more_steps, *first], second), logs, strict=True)
    ]
    assert [forks.wait(pid) for pid in pids] == [2, 2]
    for log in logs:
        assert log.read_text("utf-8") == (
            "transformer-jax: process 1 has different options from process 0: "
            f"train.steps {STEPS + 1} in process 0, {STEPS} in this process\n"
        )


@pytest.mark.exhaustive
def test_a_run_of_two_processes_resumes_in_one_and_with_other_parallelism(
    run_of_two: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", run_of_two, run], check=True)
    pmap = ["--train.parallelism", "pmap", "--train.steps", str(STEPS + 1)]
    assert_success(start_two(tmp_path, "resume", "run", *pmap))
    assert_success([start(tmp_path, "resume", "run", "--train.steps", str(STEPS + 2))])
    assert transformer_jax.load(run, average_checkpoints=1).step == STEPS + 2


@pytest.mark.exhaustive
def test_two_processes_start_and_continue_a_run_with_the_same_command(
    run_of_two: Path, tmp_path: Path, forks: Forks
) -> None:
    for steps in (CHECKPOINT, STEPS, STEPS):
        more = "--resume", "--train.steps", str(steps)
        run = train_in_forks(forks, tmp_path, *([*x, *more] for x in options_of_two()))
    assert_same(params_of(run), params_of(run_of_two))


@pytest.mark.exhaustive
def test_an_error_in_the_primary_process_ends_the_other_with_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    primary, other = wait_for_end(start_two(tmp_path, "train", "mine.py", "--out", "run"))
    assert primary == other
    exit_code, stderr = primary
    assert exit_code == 2
    assert stderr.startswith("transformer-jax: run ")
    assert len(stderr.splitlines()) == 1


def test_a_missing_primary_process_ends_the_command_with_one_line(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = ["--coordinator", address, "--num-processes", "2", "--process-id", "1"]
    program = (
        "import sys; from transformer_jax import cli; "
        "from transformer_jax.distributed import rendezvous; "
        "rendezvous.RENDEZVOUS_SECONDS = 1; sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "tiny", "--out", str(tmp_path / "x"), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 69, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.slurm
@pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no cluster")
def test_srun_on_two_nodes_trains_as_one_process_with_two_devices(
    run_of_two: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CONFIG)
    command = ["srun", "-N2", "-n2", sys.executable, "-m", "transformer_jax", "train", "mine.py"]
    done = subprocess.run(
        [*command, "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT.parents[1]}:{SUPPORT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "in 2 processes" in done.stdout
    assert_equal_runs(run_of_two, tmp_path / "run")
    # The run already exists, so the second attempt must fail without changing the run.
    again = subprocess.run([*command, "--out", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
