"""Test that a worker runs the remaining phases of its run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bucket_servers import BucketServer
from corpora import write_treebank
from example_configs import SMALL
from run_files import make_finished_sweep, set_status, write_results

from transformer_jax.config import Config, Row
from transformer_jax.data.prepare import prepare_text
from transformer_jax.distributed.supervisor import module_command
from transformer_jax.errors import (
    ConfigError,
    LostProcessError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    UsageError,
)
from transformer_jax.files import JsonObject, write_json
from transformer_jax.remote.copies import local_path, publish
from transformer_jax.runs.metrics_file import format_report
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps import worker
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import JOB_VARIABLE, SLOT_VARIABLE, read_status, write_status


@pytest.fixture
def run(tmp_path: Path) -> SweepRun:
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1)
    sweep.store()
    sweep.runs[0].path.mkdir()
    return sweep.runs[0]


@pytest.mark.parametrize("num_test_trees", [0, 8])
def test_only_a_run_whose_text_has_a_test_set_is_scored_on_it(
    num_test_trees: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_treebank(tmp_path / "trees", test=num_test_trees)
    data = {"corpus": "trees", "folder": str(folder), "vocab_size": 64}
    sweep = plan_sweep(tmp_path / "sweep", {"trees": Row(Config().change(data=data))}, 1)
    sweep.store()
    [run] = sweep.runs
    prepared = prepare_text(run.config.data)
    RunFolder.create(run.path, run.config, prepared.vocabulary, prepared.fingerprint)
    run.log_file.touch()
    monkeypatch.setattr(worker, "module_command", lambda _: [sys.executable, "-c", "exit(7)"])
    write_results(run, 5.0, 10, ["dev"])
    write_status(run, "stopped", finished=["train", "dev"])
    assert worker.run_worker([run], 60.0) == (7 if num_test_trees else 0)
    status = read_status(run)
    assert (status.status, status.phase) == (("failed", "test") if num_test_trees else ("done", ""))


def test_finished_phases_are_not_repeated(run: SweepRun) -> None:
    write_results(run, 5.0, 10)
    write_status(run, "stopped", finished=["train", "dev", "test"])
    assert worker.main(str(run.path.parents[1]), run.name, "60") == 0
    assert read_status(run).status == "done"


def test_a_worker_that_cannot_start_has_the_exit_code_of_its_error(tmp_path: Path) -> None:
    """Clusters start a run again after the code of a StorageError."""
    for content, code in ((None, UsageError.exit_code), ("{", StorageError.exit_code)):
        if content is not None:
            (tmp_path / "sweep.json").write_text(content)
        words = module_command(
            [str(tmp_path), "base/seed-0", "60"], "transformer_jax.sweeps.worker"
        )
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("transformer-jax: ")
        assert done.stderr.count("\n") == 1


def test_only_one_of_two_workers_that_start_at_once_runs_a_phase(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(1)"
    command = [sys.executable, "-c", code, str(tmp_path / "phases")]
    monkeypatch.setattr(worker, "module_command", lambda _: command)
    write_status(run, "stopped", finished=["train"])
    run.log_file.touch()
    with ThreadPoolExecutor(4) as pool:
        codes = [pool.submit(worker.run_worker, [run], 60.0) for _ in range(4)]
    # The phase does not store a score.
    # The others exit with a code after which a cluster starts them again.
    refused = [RunInterrupted.exit_code] * 3
    assert sorted(code.result() for code in codes) == [StorageError.exit_code, *refused]
    assert (tmp_path / "phases").read_text() == "x"


def test_a_run_that_was_deleted_is_trained_again(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(run, "done", finished=["train", "dev", "test"])
    run.path.rmdir()
    assert read_status(run).status == "queued"
    run.log_file.touch()
    monkeypatch.setattr(worker, "module_command", lambda _: [sys.executable, "-c", "exit(7)"])
    assert worker.run_worker([run], 60.0) == 7
    status = read_status(run)
    assert (status.status, status.phase) == ("failed", "train")


@pytest.mark.parametrize(
    "content", [SMALL.change(train={"learning_rate_scale": 2.0}).to_dict(), {"train": {"x": 1}}]
)
def test_a_run_whose_config_file_differs_from_the_plan_is_not_trained(
    content: JsonObject, run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.config_file, content)
    run.log_file.touch()
    monkeypatch.setattr(worker, "module_command", lambda _: [sys.executable, "-c", "exit(7)"])
    assert worker.run_worker([run], 60.0) == ConfigError.exit_code
    status = read_status(run)
    assert (status.status, status.note) == (
        "failed",
        f"{run.config_file} is missing or differs from the config in sweep.json: "
        "delete it, and repeat the sweep with --retry-failed",
    )
    # The next command of the sweep stores the planned config.
    run.config_file.unlink()
    Sweep.open(run.path.parents[1]).store()
    assert worker.run_worker([run], 60.0) == 7


def test_a_run_whose_scores_were_deleted_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_finished_sweep(tmp_path / "s", rows=["base"]).runs[0]
    write_status(run, "done", finished=["train", "dev", "test"])
    assert read_status(run).status == "done"
    [folder] = run.path.glob("evaluations/dev-*")
    shutil.rmtree(folder)
    status = read_status(run)
    assert status.summary == "queued: its scores were deleted"
    assert status.finished == ("train", "test")
    run.log_file.touch()
    monkeypatch.setattr(worker, "module_command", lambda _: [sys.executable, "-c", "exit(7)"])
    assert worker.run_worker([run], 60.0) == 7
    status = read_status(run)
    assert (status.status, status.phase) == ("failed", "dev")


def test_a_run_of_a_worker_is_a_single_process(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These variables would otherwise mean that the job's other pods train the same run.
    for name in ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        monkeypatch.setenv(name, "1")
    run.path.rmdir()
    run.log_file.touch()
    commands = []

    def record(arguments: list[str]) -> list[str]:
        commands.append(arguments)
        return [sys.executable, "-c", "exit(7)"]

    monkeypatch.setattr(worker, "module_command", record)
    assert worker.run_worker([run], 60.0) == 7
    [[*_, name, count, _]] = commands
    assert (name, count) == ("--num-processes", "1")


def test_a_stuck_run_is_retried_by_its_sweep(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_stuck(*_: object, **__: object) -> int:
        raise LostProcessError("no heartbeat for 60 s", run.path)

    run.log_file.touch()
    monkeypatch.setattr(worker, "supervise", get_stuck)
    assert worker.run_worker([run], 60.0) == LostProcessError.exit_code
    note = "no heartbeat for 60 s; repeat the sweep with --retry-failed"
    assert read_status(run).note == note


def test_a_job_of_a_cluster_that_never_makes_progress_fails(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> int:
        raise LostProcessError("SIGSEGV ended training after step 0", run.path)

    monkeypatch.setattr(worker, "supervise", crash)
    monkeypatch.setenv(JOB_VARIABLE, "skypilot-s")
    run.log_file.touch()
    codes = [worker.run_worker([run], 60.0) for _ in range(2)]
    note = "SIGSEGV ended training after step 0; the cluster restarts the run"
    assert (codes, read_status(run).note) == ([75, 75], note)
    # Progress resets the count.
    steps = iter((0, 8))
    monkeypatch.setattr(worker, "measure_progress", lambda _: (0, next(steps)))
    assert worker.run_worker([run], 60.0) == 75
    monkeypatch.setattr(worker, "measure_progress", lambda _: (0, 8))
    codes = [worker.run_worker([run], 60.0) for _ in range(3)]
    assert codes == [75, 75, 1]
    assert read_status(run).summary == f"failed, train: {note} (no progress in 3 attempts)"


def test_a_signal_before_the_first_phase_stops_a_worker(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_: SweepRun) -> tuple[int, int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0, 0

    monkeypatch.setattr(worker, "measure_progress", measure)
    assert worker.run_worker([run], 60.0) == RunInterrupted.exit_code
    assert read_status(run).summary == "stopped: stopped before the next phase"


def test_a_phase_that_a_signal_kills_names_the_signal(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(worker, "module_command", lambda _: command)
    write_status(run, "stopped", finished=["train"])
    assert worker.run_worker([run], 60.0) == RunInterrupted.exit_code
    assert read_status(run).summary == "failed, dev: killed by SIGKILL"


TRAINER = """
import json, os, sys
from pathlib import Path
from transformer_jax.sweeps.joint import _record_end
from transformer_jax.console import PlainConsole
from transformer_jax.errors import DivergedError
from transformer_jax.sweeps.plan import Sweep
sweep, names = Sweep.open(Path(sys.argv[-2])), sys.argv[-1].split(",")
print("trains", *names, flush=True)
if len(names) > 2:
    sys.exit(71)
for run in map(sweep.find, names):
    error = DivergedError("diverged") if run.seed == 0 else None
    if run.seed != 3:
        _record_end(run, PlainConsole(), os.getppid(), error)
print("an unknown error")
sys.exit(1)
"""


def test_the_last_run_of_a_group_that_needs_too_much_memory_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 2)
    sweep.store()
    for run in sweep.runs:
        run.path.mkdir()

    def supervise_fake(command: list[str], *_: object, **__: object) -> int:
        if "transformer_jax.sweeps.joint" not in command:
            return 7
        write_status(sweep.runs[0], "failed", note="diverged")
        return OutOfMemoryError.exit_code

    monkeypatch.setattr(worker, "supervise", supervise_fake)
    assert worker.run_worker(sweep.runs, 60.0) == 7
    statuses = [read_status(run) for run in sweep.runs]
    assert [(status.status, status.exit_code) for status in statuses] == [
        ("failed", 0),
        ("failed", 7),
    ]


def test_a_signal_during_the_first_half_of_a_divided_group_stops_the_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 4)
    sweep.store()
    trained = []

    def supervise_fake(
        command: list[str], *_: object, forwarded_signals: list[int], **__: object
    ) -> int:
        trained.append(command[-1])
        if len(trained) == 1:
            return OutOfMemoryError.exit_code
        forwarded_signals.append(signal.SIGTERM)
        return RunInterrupted.exit_code

    monkeypatch.setattr(worker, "supervise", supervise_fake)
    assert worker.run_worker(sweep.runs, 60.0) == RunInterrupted.exit_code
    names = [run.name for run in sweep.runs]
    assert trained == [",".join(names), ",".join(names[:2])]
    statuses = [read_status(run) for run in sweep.runs]
    assert [status.status for status in statuses] == ["stopped"] * 4
    assert statuses[-1].note == "stopped before training"


@pytest.mark.slow
def test_runs_that_need_too_much_memory_train_in_smaller_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 4)
    sweep.store()
    for run in sweep.runs:
        run.log_file.write_text(f"the log of {run.name}\n")
        run.path.mkdir()

    def command(arguments: list[str], module: str = "") -> list[str]:
        # Scoring fails, so that this test does not need trained models.
        code = TRAINER if module else "exit(7)"
        return [sys.executable, "-c", code, *arguments]

    monkeypatch.setattr(worker, "module_command", command)
    monkeypatch.setattr(worker, "_has_test_set", lambda _: True)
    assert worker.run_worker(sweep.runs, 60.0)
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith("trains")]
    names = [run.name for run in sweep.runs]
    assert lines == [f"trains {' '.join(part)}" for part in (names, names[:2], names[2:])]
    statuses = [read_status(run) for run in sweep.runs]
    assert [status.summary for status in statuses] == [
        # This run diverged, the next two are trained but not scored, and the last one crashed.
        "failed, train: transformer-jax: diverged",
        "failed, dev: the log of base/seed-1",
        "failed, dev: the log of base/seed-2",
        "failed, train: the log of base/seed-3",
    ]


@pytest.mark.parametrize(
    ("job", "code", "status"),
    [("7_0", 0, "done"), ("8_0", RunInterrupted.exit_code, "running")],
    ids=["own job", "another job"],
)
def test_a_job_that_is_queued_again_takes_over_its_own_run_only(
    job: str, code: int, status: str, run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv(SLOT_VARIABLE, "slurm")
    write_results(run, 5.0, 10)
    # The status file says that the run is still running on the previous node.
    write_status(run, "running", job=job, finished=["train", "dev", "test"])
    assert worker.run_worker([run], 60.0) == code
    assert read_status(run).status == status


def test_a_local_worker_leaves_a_run_of_another_launcher_in_the_same_allocation_alone(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv(SLOT_VARIABLE, "cpu 0")
    write_results(run, 5.0, 10)
    write_status(run, "running", finished=["train", "dev", "test"])
    assert worker.run_worker([run], 60.0) == RunInterrupted.exit_code
    # `slurm.submit` does not submit a run whose job still exists.
    assert (read_status(run).status, read_status(run).job) == ("running", "")


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("age", "code", "status"),
    [(60.0, RunInterrupted.exit_code, "running"), (7200.0, 0, "done")],
    ids=["active", "silent"],
)
def test_a_worker_on_a_new_machine_takes_over_only_a_run_that_is_silent(
    age: float,
    code: int,
    status: str,
    server: BucketServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The files that the new machine downloads are new, even if their contents are old."""
    url = server.url("s")
    sweep = plan_sweep(local_path(url), {"base": Row(SMALL)}, 1)
    sweep.store()
    [run] = sweep.runs
    write_results(run, 5.0, 10)
    details = {"host": "lost", "pid": 1, "time": time.time() - 7200.0}
    set_status(run, "running", finished=["train", "dev", "test"], **details)
    report = {"step": 4, "split": "train", "time": time.time() - age}
    (run.path / "metrics.jsonl").write_text(format_report(report))
    publish(sweep.path)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "new"))
    assert worker.main(url, run.name, "60") == code
    [run] = Sweep.open(local_path(url)).runs
    assert read_status(run).status == status
