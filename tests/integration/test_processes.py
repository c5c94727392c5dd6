"""Two processes train one run as one process with two devices does, and end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import metrics_of

import transformer_jax
from transformer_jax.distributed.processes import join_processes
from transformer_jax.distributed.rendezvous import ProcessSpec, rendezvous, resolve_cluster
from transformer_jax.errors import ConnectionFailedError, UsageError
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_directory import RunDirectory

TESTS = Path(__file__).parents[1]
STEPS, SAVED = 24, 12
# Split over both, so that no process can save or score alone.
CONFIG = f"""
from small import SMALL
train = {{"steps": {STEPS}, "checkpoint_every": {SAVED}, "log_every": 1, "bleu_every": 9}}
CONFIG = SMALL.change(data={{"num_pairs": 100}}, train=train | {{"parallelism": "fsdp"}})
"""


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def begin(folder: Path, *command: str, more: str = "", **environment: str) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(CONFIG + more)
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_jax", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin_two(folder: Path, *command: str, more: str = "") -> list[subprocess.Popen[str]]:
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    return [begin(folder, *command, *place, "--process-id", str(i), more=more) for i in range(2)]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return of each process its exit code and what it wrote to standard error."""
    found = []
    for process in processes:
        _, told = process.communicate(timeout=400)
        found.append((process.returncode, told))
    return found


def wait_for_metrics(run: Path, processes: list[subprocess.Popen[str]]) -> None:
    metrics, until = run / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    folder = tmp_path_factory.mktemp("hosts")
    for code, told in ended(begin_two(folder, "train", "mine.py", "--out", "run")):
        assert code == 0, told
    return folder / "run"


def params_of(run: Path) -> Any:
    return transformer_jax.load(run, average_checkpoints=1).params


def assert_equal(left: Path, right: Path) -> None:
    assert metrics_of(left) == metrics_of(right)
    import jax

    jax.tree.map(np.testing.assert_array_equal, params_of(left), params_of(right))


def test_two_processes_train_as_one_with_two_devices(undisturbed: Path, tmp_path: Path) -> None:
    one = begin(tmp_path, "train", "mine.py", "--out", "run", JAX_NUM_CPU_DEVICES="2")
    ((code, told),) = ended([one])
    assert code == 0, told
    ours, theirs = metrics_of(undisturbed), metrics_of(tmp_path / "run")
    # Every report once, although two processes made them.
    assert [(r["step"], r["split"]) for r in ours] == [(r["step"], r["split"]) for r in theirs]
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left["perplexity"], right["perplexity"], rtol=1e-6)
    names = [sorted(path.name for path in run.iterdir()) for run in (undisturbed, tmp_path / "run")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_at_one_step_and_nothing_is_lost(
    undisturbed: Path, tmp_path: Path
) -> None:
    processes = begin_two(tmp_path, "train", "mine.py", "--out", "run")
    wait_for_metrics(tmp_path / "run", processes)
    processes[1].send_signal(signal.SIGTERM)
    found = ended(processes)
    folder = RunDirectory.open(tmp_path / "run")
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        step = checkpoints.latest_valid()
    for code, told in found:
        assert code == 75, told
        assert f"SIGTERM: saved at step {step};" in told
    assert step is not None
    assert step < STEPS
    for code, told in ended(begin_two(tmp_path, "resume", "run")):
        assert code == 0, told
    assert_equal(undisturbed, tmp_path / "run")


LOST = f"""
import os, signal, sys, time
from pathlib import Path
from transformer_jax.errors import StorageError
from transformer_jax.training import loop
from transformer_jax.distributed import heartbeat
def lose():
    Path("lost").touch()
    {{lost}}
beat, prepare = heartbeat.beat, loop.prepare
save, score = loop.Checkpoints.save, loop.Training._score
def training(step):
    beat(step)
    while step == {SAVED + 1} and not Path("run/checkpoints/{SAVED}").exists():
        time.sleep(0.05)
    # Long enough after a checkpoint that the supervisors know how long steps take.
    if step > {SAVED} and heartbeat._beats > 6:
        lose()
def saving(self, step, *arguments):
    save(self, step, *arguments)
    if step == {SAVED}:
        lose()
def scoring(self, step, state):
    if step == {SAVED}:
        lose()
    return score(self, step, state)
def starting(*arguments, **options):
    lose()
    return prepare(*arguments, **options)
if sys.argv[-1] == "{{who}}":
    where, name = {{where}}
    setattr(where, name, {{when}})
"""
WHERE = {
    "training": "heartbeat, 'beat'",
    "saving": "loop.Checkpoints, 'save'",
    "scoring": "loop.Training, '_score'",
    "starting": "loop, 'prepare'",
}
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("who", "when", "lost", "code"),
    [
        (1, "training", KILLED, 75),
        slow(0, "training", KILLED, 75),
        slow(1, "training", "os.kill(os.getpid(), signal.SIGSTOP)", 75),
        slow(1, "training", "time.sleep(1000)", 75),
        slow(1, "saving", KILLED, 75),
        slow(1, "scoring", KILLED, 75),
        slow(1, "starting", KILLED, 75),
        slow(0, "saving", "raise StorageError('the disk is gone')", 74),
        slow(1, "saving", "raise StorageError('the disk is gone')", 74),
        slow(1, "starting", "raise StorageError('the disk is gone')", 74),
    ],
)
def test_what_ends_one_of_two_ends_both_in_a_minute_and_the_run_goes_on_to_the_same_bits(
    who: int,
    when: str,
    lost: str,
    code: int,
    undisturbed: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    watched = ("--supervise", "--step-timeout", "10")
    more = LOST.format(who=who, when=when, where=WHERE[when], lost=lost)
    found = ended(begin_two(tmp_path, "train", "mine.py", "--out", "run", *watched, more=more))
    seconds = time.time() - (tmp_path / "lost").stat().st_mtime
    record_property("both ended after, in seconds", seconds)
    assert [code for code, _ in found] == [code, code], found
    assert seconds < 60
    for _, told in found:
        last = told.splitlines()[-1]
        if code == 74:
            assert last == "transformer-jax: the disk is gone"
        else:
            assert last.startswith("transformer-jax: ")
            assert last.endswith("resume with `transformer-jax resume run`")
    for code, told in ended(begin_two(tmp_path, "resume", "run", *watched)):
        assert code == 0, told
    assert_equal(undisturbed, tmp_path / "run")


def test_processes_that_were_given_other_options_are_told_which(
    undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").symlink_to(undisturbed)
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    steps = ["--train.steps", str(STEPS + 1)]
    first = begin(tmp_path, "resume", "run", *steps, *place, "--process-id", "0")
    other = begin(tmp_path, "resume", "run", *place, "--process-id", "1")
    for code, told in ended([first, other]):
        assert code == 2
        assert told == (
            "transformer-jax: process 1 was given other options than process 0: "
            f"train.steps {STEPS + 1} there, {STEPS} here\n"
        )


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one_and_under_another_placement(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", undisturbed, run], check=True)
    more = ["--train.parallelism", "pmap", "--train.steps", str(STEPS + 1)]
    for code, told in ended(begin_two(tmp_path, "resume", "run", *more)):
        assert code == 0, told
    ((code, told),) = ended([begin(tmp_path, "resume", "run", "--train.steps", str(STEPS + 2))])
    assert code == 0, told
    assert transformer_jax.load(run, average_checkpoints=1).step == STEPS + 2


def test_what_ends_the_first_process_ends_the_other_with_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    first, other = ended(begin_two(tmp_path, "train", "mine.py", "--out", "run"))
    assert first == other
    code, told = first
    assert code == 2
    assert told.startswith("transformer-jax: run is there already")
    assert len(told.splitlines()) == 1


def test_a_first_process_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectionFailedError, match=rf"process 0 was not found at {place} within 1 s"
    ):
        rendezvous(ProcessSpec(place, 2, 1), 1)
    with pytest.raises(ConnectionFailedError, match=r"not found at nowhere\.invalid:1 "):
        rendezvous(ProcessSpec("nowhere.invalid:1", 2, 1), 0.1)
    given = ["--coordinator", place, "--num-processes", "2", "--process-id", "1"]
    program = "import sys; from transformer_jax import cli; from transformer_jax.training import "
    program += "meeting; meeting.MEETING_SECONDS = 1; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "tiny", "--out", str(tmp_path / "x"), *given],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 69
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_a_process_that_does_not_come_is_named() -> None:
    with pytest.raises(ConnectionFailedError, match=r"2 of 3 processes did not come .*: 1, 2$"):
        rendezvous(ProcessSpec(f"127.0.0.1:{free_port()}", 3, 0), 0.3)


def test_an_address_in_use_is_told() -> None:
    with socket.create_server(("", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            ConnectionFailedError, match=f"cannot meet at {place}: Address already in"
        ):
            rendezvous(ProcessSpec(place, 2, 0), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, 0), "--coordinator is missing"),
        (("host:1", 2, None), "--process-id is missing"),
        (("host:1", 2, 2), "must be from 0 to 1, .* got 2"),
        (("host", 2, 1), "must be HOST:PORT, got 'host'"),
        (("host:99999", 2, 1), "must be HOST:PORT"),
    ],
)
def test_half_an_address_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_cluster(*given)


SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # Alone on its node, a process has all of the node's devices; else JAX gives it one.
        (SLURM, ProcessSpec("node1:62344", 2, 1)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, ProcessSpec("node1:62344", 2, 1, [0])),
        (MPI, ProcessSpec("10.96.0.1:62624", 8, 5, [1])),
        # The script of sbatch, and a step of one task.
        ({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({}, None),
    ],
)
def test_the_environment_says_who_is_there(
    environment: dict[str, str], expected: ProcessSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_cluster(None, None, None) == expected


def test_one_of_several_that_cannot_find_the_others_says_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Open MPI 5 no longer says where it is.
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    with pytest.raises(UsageError, match=r"--coordinator HOST:PORT.*--num-processes 1 for"):
        resolve_cluster(None, None, None)
    with join_processes(Path("run"), None, 1, None) as alone:
        assert alone.count == 1


@pytest.mark.slurm
@pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no cluster")
def test_srun_on_two_nodes_trains_as_one_process_with_two_devices(
    undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CONFIG)
    command = ["srun", "-N2", "-n2", sys.executable, "-m", "transformer_jax", "train", "mine.py"]
    done = subprocess.run(
        [*command, "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "in 2 processes" in done.stdout
    assert_equal(undisturbed, tmp_path / "run")
    # The line of whatever ends one is that of all.
    again = subprocess.run([*command, "--out", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
