"""Test that unfinished runs are submitted to Slurm once and resume after Slurm ends them."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Importing submitit creates a logging handler that keeps a reference to the current standard error
# stream, so import it before pytest replaces standard error for a test.
import submitit  # noqa: F401
from example_configs import SMALL
from run_files import set_status, write_results

from transformer_jax.cli import main
from transformer_jax.config import Row
from transformer_jax.errors import DivergedError, UsageError
from transformer_jax.sweeps import launch, slurm
from transformer_jax.sweeps.plan import Sweep, SweepRun, plan_sweep
from transformer_jax.sweeps.status import RunStatus, read_status, write_status

SUPPORT = Path(__file__).parents[1] / "support"
# The simulated `sbatch` copies each submitted script, and the simulated `squeue` prints the
# contents of the `queue` file.
SBATCH = """#!/bin/sh
if [ -e {folder}/refuses ]; then echo "sbatch: error: Invalid partition" >&2; exit 1; fi
count=$(ls {folder} | grep -c submitted)
cp "$1" {folder}/submitted-$((70 + count))
echo "Submitted batch job $((70 + count))"
"""
SQUEUE = """#!/bin/sh
if [ -e {folder}/silent ]; then echo "slurm_load_jobs error: no controller" >&2; exit 1; fi
cat {folder}/queue
"""
CONFIG = """
    from example_configs import SMALL
    SWEEP = {"base": SMALL, "B": SMALL.change(model={"d_ff": 48})}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of simulated Slurm commands; the current directory contains a sweep's config."""
    folder, work = tmp_path / "cluster", tmp_path / "work"
    for path in (folder, work):
        path.mkdir()
    scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}
    for name, script in scripts.items():
        (folder / name).write_text(script.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    (work / "mine.py").write_text(textwrap.dedent(CONFIG))
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return folder


def submit_sweep(*options: str) -> int:
    return main(["sweep", "mine.py", "--seeds", "2", "--launcher", "slurm", *options])


def statuses() -> dict[str, RunStatus]:
    return {run.name: read_status(run) for run in Sweep.open(Path("sweeps/mine")).runs}


def submissions(cluster: Path) -> list[str]:
    return [path.read_text() for path in sorted(cluster.glob("submitted-*"))]


def test_one_array_job_requests_the_resources_of_the_options(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "partition": "gpu",
        "time": "1-02:00:30",
        "max-parallel": "3",
        "gpus": "2",
        "cpus": "6",
        "memory-gb": "1.5",
        "account": "us",
        "qos": "low",
        "constraint": "a100&ib",
        "gres": "gpu:a100:2",
        "setup": "module load python",
    }
    arguments = [word for name, value in options.items() for word in (f"--slurm.{name}", value)]
    assert submit_sweep(*arguments) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "submitted array 70 (4 tasks, 3 at a time); you can close this terminal",
        "next: transformer-jax status sweeps/mine",
    ]
    [script] = submissions(cluster)
    for line in (
        *("array=0-3%3", "partition=gpu", "time=1561", "gpus-per-node=2", "cpus-per-task=6"),
        *("mem=1536MB", "account=us", "qos=low", "requeue", "signal=USR2@120", "job-name=mine"),
        *("constraint='a100&ib'", "gres=gpu:a100:2"),
    ):
        assert f"#SBATCH --{line}\n" in script
    assert "\nmodule load python\n" in script.partition("srun --unbuffered")[0]
    assert " --cpus-per-task=6 " in script
    # Every row's first seed is submitted before any row's second seed.
    assert {name: status.job for name, status in statuses().items()} == {
        "base/seed-0": "70_0",
        "B/seed-0": "70_1",
        "base/seed-1": "70_2",
        "B/seed-1": "70_3",
    }
    assert main(["status", "sweeps/mine"]) == 0
    assert "4 submitted" in capsys.readouterr().out


def test_a_single_run_without_a_gpu_is_a_plain_job(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        submit_sweep("--slurm.gpus", "0", "--seeds", "1", "--rows", "base", "--slurm.time", "2")
        == 0
    )
    [script] = submissions(cluster)
    assert "--gpu" not in script
    assert "--array" not in script
    # With a short time limit, a quarter of the limit is reserved for saving.
    assert "signal=USR2@30\n" in script
    assert statuses()["base/seed-0"].job == "70"
    assert "submitted job 70 (1 task)" in capsys.readouterr().out


def test_the_rows_are_submitted_after_their_trials(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ("--seeds", "1", "--tune", "train.learning_rate_scale", "0.5", "1")
    assert submit_sweep(*tune) == 0
    out = capsys.readouterr().out
    assert "submitted array 70 (4 tasks, 8 at a time)" in out
    assert "when the trials have ended, repeat this command to train the rows" in out
    trials = Sweep.open(Path("sweeps/mine")).trials
    perplexities = {"base/0.5": 5.0, "base/1.0": 4.0, "B/0.5": 4.0, "B/1.0": 5.0}
    for run in trials:
        name = run.name.removeprefix("tune/").rpartition("/")[0]
        write_results(run, perplexities[name], 5, splits=["dev"])
        set_status(run, "done", finished=["train", "dev"])
    assert submit_sweep(*tune) == 0
    out = capsys.readouterr().out
    assert "submitted array 71 (2 tasks, 8 at a time)" in out
    assert "trials" not in out
    rates = {x.run.row: x.run.config.train.learning_rate_scale for x in statuses().values()}
    assert rates == {"base": 1.0, "B": 0.5}
    assert {x.job for x in statuses().values()} == {"71_0", "71_1"}
    assert len(submissions(cluster)) == 2


def test_a_row_that_diverges_with_every_value_is_not_submitted_again(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ("--seeds", "1", "--tune", "train.learning_rate_scale", "0.5", "1")
    assert submit_sweep(*tune) == 0
    for run in Sweep.open(Path("sweeps/mine")).trials:
        if run.row == "base":
            set_status(run, "failed", exit_code=DivergedError.exit_code)
        else:
            write_results(run, 5.0, 5, splits=["dev"])
            set_status(run, "done", finished=["train", "dev"])
    capsys.readouterr()
    assert submit_sweep(*tune) == 0
    out = capsys.readouterr().out
    assert "submitted job 71 (1 task)" in out
    assert "trials" not in out
    assert {name: status.job for name, status in statuses().items()} == {
        "base/seed-0": "",
        "B/seed-0": "71",
    }
    (cluster / "queue").write_text("71\n")
    assert submit_sweep(*tune) == 1
    assert submit_sweep(*tune, "--retry-failed") == 0
    out = capsys.readouterr().out
    assert "submitted array 72 (2 tasks" in out
    assert "when the trials have ended" in out


def test_only_runs_that_slurm_has_dropped_are_submitted_again(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_sweep() == 0
    (cluster / "queue").write_text("69\n70_0\n70_1\n70_2\n70_3\n")
    base, wide, other, last = (status.run for status in statuses().values())
    set_status(base, "running", phase="train", job="70_0", host="elsewhere")
    capsys.readouterr()
    assert submit_sweep() == 0
    assert "nothing to submit" in capsys.readouterr().out
    assert len(submissions(cluster)) == 1
    # The first run was killed, the second was canceled while pending, the third saved a
    # checkpoint and was requeued by Slurm, and the fourth failed.
    (cluster / "queue").write_text("70_2\n")
    write_status(other, "stopped", job="70_2")
    write_status(last, "failed", note="diverged", job="70_3")
    assert submit_sweep("--slurm.gpus", "0") == 0
    assert "array=0-1%2\n" in submissions(cluster)[1]
    jobs = {name: status.job for name, status in statuses().items()}
    assert jobs == {
        "base/seed-0": "71_0",
        "B/seed-0": "71_1",
        "base/seed-1": "70_2",
        "B/seed-1": "70_3",
    }
    (cluster / "queue").write_text("70_2\n71_0\n71_1\n")
    for run in (base, wide):
        write_status(run, "done")
    capsys.readouterr()
    assert submit_sweep() == 1
    expected = (
        "1 of 4 runs failed: B/seed-1; to train them again, repeat the sweep with --retry-failed"
    )
    assert expected in capsys.readouterr().err
    assert submit_sweep("--retry-failed") == 0
    assert {
        name: status.job for name, status in statuses().items() if status.status == "submitted"
    } == {"B/seed-1": "72"}


def test_the_local_launcher_trains_only_runs_that_slurm_has_dropped(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit_sweep() == 0
    (cluster / "queue").write_text("70_0\n70_1\n")
    started = []

    def start_worker(_: Sweep, runs: list[SweepRun], *__: object) -> subprocess.Popen[bytes]:
        [run] = runs
        started.append(run.name)
        write_status(run, "failed", note="tried")
        return subprocess.Popen(["true"])

    monkeypatch.setattr("transformer_jax.sweeps.launch.start_worker", start_worker)
    assert main(["sweep", "mine.py", "--seeds", "2"]) == 1
    assert started == ["base/seed-1", "B/seed-1"]


@pytest.mark.usefixtures("cluster")
def test_a_job_that_finishes_while_slurm_is_asked_stays_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert submit_sweep() == 0
    finished, *canceled = (status.run for status in statuses().values())

    def list_jobs() -> set[str]:
        write_status(finished, "done", job="70_0")
        return set()

    monkeypatch.setattr(slurm, "list_jobs", list_jobs)
    slurm.reconcile(Sweep.open(Path("sweeps/mine")))
    assert read_status(finished).status == "done"
    assert {read_status(run).status for run in canceled} == {"stopped"}


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--slurm.time", "soon"], "slurm.time must be minutes, HOURS:MINUTES:SECONDS, or", 2),
        (["--slurm.gpus", "some"], "--slurm.gpus must be an integer, got 'some'", 2),
        (["--slurm.partitoin", "x"], "did you mean --slurm.partition?", 2),
        (["--devices", "2"], "takes --slurm.max-parallel instead of --devices", 2),
        (["--launcher", "local", "--slurm.gpus", "0"], "need --launcher slurm", 2),
        (["--launcher", "slrum"], "did you mean 'slurm'?", 2),
        (["refuses"], "Slurm rejects the job: sbatch: error: Invalid partition", 2),
        (["silent"], "Slurm does not respond: slurm_load_jobs error: no controller", 69),
        (["sbatch"], "sbatch is not on PATH: use a machine with Slurm", 69),
        (["squeue"], "squeue is not on PATH", 69),
        (["submitit"], "the Slurm launcher needs submitit: pip install submitit", 2),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_submits_nothing(
    options: list[str],
    message: str,
    code: int,
    cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    match options:
        case ["refuses" | "silent" as mood]:
            (cluster / mood).touch()
        case ["sbatch" | "squeue" as missing]:
            (cluster / missing).unlink()
            monkeypatch.setenv("PATH", str(cluster))
        case ["submitit"]:
            monkeypatch.setitem(sys.modules, "submitit", None)
    assert submit_sweep(*(option for option in options if len(options) > 1)) == code
    # Ignore warnings and progress messages from data preparation, which may precede the error.
    errors = capfd.readouterr().err.splitlines()
    [line] = [x for x in errors if not re.search(r"^(warning|note): | \.\.\.$", x)]
    assert message in line
    assert not submissions(cluster)


def test_a_dry_run_calls_no_slurm_command_and_creates_nothing(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "srun"):
        (cluster / name).unlink()
    assert submit_sweep("--dry-run") == 0
    out = capsys.readouterr().out
    assert "2 rows x 2 seeds = 4 runs by Slurm, 8 at a time" in out
    assert "12:00:00" in out
    assert [path.name for path in Path().iterdir()] == ["mine.py"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRun:
    """A run that was submitted as job 7_0. The test process plays the role of this job's task."""
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1)
    sweep.store()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    write_status(sweep.runs[0], "submitted", job="7_0")
    return sweep.runs[0]


def make_task(run: SweepRun, fruitless_requeues: int = 0) -> slurm.Task:
    return slurm.Task(str(run.path.parents[1]), run.name, 60.0, fruitless_requeues)


def test_a_task_whose_run_belongs_to_another_job_does_nothing(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SUBMISSION_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "start_worker", lambda *_: pytest.fail("a worker started"))
    write_status(run, "submitted", job="8_0")
    with pytest.raises(UsageError, match=r"base/seed-0 belongs to job 8_0"):
        make_task(run)()


@pytest.fixture
def run_task(run: SweepRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """A function that runs a program as the task's worker and returns the exit code."""
    handler = signal.getsignal(signal.SIGTERM)

    def run_program(program: str) -> int:
        command = [sys.executable, "-c", f"import os, signal; {program}"]
        monkeypatch.setattr(launch, "module_command", lambda *_: command)
        with pytest.raises(SystemExit) as end:
            make_task(run)()
        return int(end.value.code or 0)

    yield run_program
    signal.signal(signal.SIGTERM, handler)


def test_a_killed_worker_is_recorded_as_stopped(
    run: SweepRun, run_task: Callable[[str], int]
) -> None:
    assert run_task("os.kill(os.getpid(), 9)") == 75
    assert (read_status(run).status, read_status(run).note) == (
        "stopped",
        "its worker exited with code -9",
    )


def test_a_task_that_slurm_ends_lets_its_worker_save_and_waits_for_slurm(
    run: SweepRun, run_task: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(slurm.time, "sleep", sleeps.append)
    saves = "signal.signal(15, lambda *_: os._exit(75)); os.kill(os.getppid(), 15); signal.pause()"
    assert run_task(saves) == 75
    assert sleeps == [slurm.LINGER_SECONDS]
    assert read_status(run).note.startswith("Slurm ended job 7_0")


def test_a_worker_ignores_the_signal_of_the_time_limit(run_task: Callable[[str], int]) -> None:
    # Slurm sends SIGUSR2 to every process of a task. Without a handler, SIGUSR2 kills the process.
    assert run_task("os.kill(os.getpid(), signal.SIGUSR2); os._exit(3)") == 3


def test_a_run_fails_after_three_allocations_without_progress(run: SweepRun) -> None:
    again = make_task(run, fruitless_requeues=1).checkpoint()
    assert again is not None
    assert again.function.__dict__ == make_task(run, fruitless_requeues=2).__dict__
    assert (read_status(run).status, read_status(run).phase) == ("submitted", "job 7_0")
    # A new checkpoint counts as progress.
    (run.path / "checkpoints" / "12").mkdir(parents=True)
    again = make_task(run, fruitless_requeues=2).checkpoint()
    assert again is not None
    assert again.function.__dict__["fruitless_requeues"] == 0
    (run.path / "checkpoints" / "12").rmdir()
    assert make_task(run, fruitless_requeues=2).checkpoint() is None
    assert read_status(run).status == "failed"
    assert "no progress in 3 allocations: increase slurm.time" in read_status(run).note


def test_a_finished_run_is_not_queued_again(run: SweepRun) -> None:
    write_status(run, "done")
    assert make_task(run).checkpoint() is None
    assert read_status(run).status == "done"


# If this `sitecustomize.py` is on the Python path, every process that trains the run base/seed-1
# fails until a file named `mended` exists.
FAULTS = """
    import os, sys
    if sys.argv[1:2] in (["train"], ["resume"]):
        from transformer_jax.distributed import heartbeat
        beat, words = heartbeat.beat, " ".join(sys.argv)
        def fail(step):
            beat(step)
            if step >= 6 and "/base/seed-1" in words and not os.path.exists("mended"):
                raise RuntimeError("of an unknown kind")
        heartbeat.beat = fail
"""
CLUSTER_CONFIG = """
    from example_configs import SMALL
    BASE = SMALL.change(train={"steps": 24, "checkpoint_every": 12})
    SWEEP = {"base": BASE, "B": BASE.change(model={"d_ff": 48})}
"""
LONG_ROW = """
    SWEEP["long"] = BASE.change(train={"steps": 1000})
"""


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(textwrap.dedent(CLUSTER_CONFIG + LONG_ROW))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    return subprocess.run(
        [sys.executable, "-m", "transformer_jax", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{SUPPORT.parents[1]}:{SUPPORT}"},
        capture_output=True,
        text=True,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slurm
@pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no cluster")
def test_on_a_cluster_a_failure_affects_one_run_and_ended_runs_resume(tmp_path: Path) -> None:
    options = ["sweep", "mine.py", "--seeds", "2", "--launcher", "slurm", "--slurm.gpus", "0"]
    submission = run_command(tmp_path, *options)
    assert submission.returncode == 0, submission.stderr
    assert "(6 tasks, 8 at a time); you can close this terminal" in submission.stdout
    [number] = [line.split()[2] for line in submission.stdout.splitlines() if "array" in line]
    runs = {run.name: run for run in Sweep.open(tmp_path / "sweeps" / "mine").runs}

    def states() -> dict[str, str]:
        return {name: read_status(run).status for name, run in runs.items()}

    def end(name: str, *command: str) -> None:
        """Wait for a checkpoint, run `scontrol`, and check that the run is saved and stops."""
        wait_until(lambda: any((runs[name].path / "checkpoints").glob("[0-9]*")))
        subprocess.run(["scontrol", *command], check=True)
        wait_until(lambda: states()[name] in ("submitted", "stopped"))
        assert "SIGTERM: saved at step" in runs[name].log_file.read_text()

    # Shorten the time limit to one minute so that Slurm sends its signal.
    end("long/seed-0", "update", f"JobId={number}_2", "TimeLimit=1")
    wait_until(lambda: states()["long/seed-0"] == "submitted")
    subprocess.run(["scontrol", "update", f"JobId={number}_2", "TimeLimit=720"], check=True)
    end("long/seed-1", "requeue", f"{number}_5")
    # Every run is pending, running, done, or failed.
    again = run_command(tmp_path, *options)
    assert "nothing to submit" in again.stdout
    # Slurm waits two minutes before it starts a requeued job.
    wait_until(lambda: set(states().values()) == {"done", "failed"})
    assert [name for name, state in states().items() if state == "failed"] == ["base/seed-1"]
    assert read_status(runs["base/seed-1"]).note.endswith("RuntimeError: of an unknown kind")
    for name in ("long/seed-0", "long/seed-1"):
        lines = (runs[name].path / "metrics.jsonl").read_text().splitlines()
        steps = [line["step"] for line in map(json.loads, lines) if line["split"] == "train"]
        # No step is reported twice, so the run must have resumed from its checkpoint.
        assert steps == sorted(set(steps))
        assert steps[-1] == 1000
    before = {name: run.status_file.read_text() for name, run in runs.items()}
    refused = run_command(tmp_path, *options)
    assert refused.returncode == 1
    assert "1 of 6 runs failed: base/seed-1" in refused.stderr
    (tmp_path / "mended").touch()
    retried = run_command(tmp_path, *options, "--retry-failed")
    assert "(1 task)" in retried.stdout, retried.stderr
    wait_until(lambda: set(states().values()) == {"done"})
    del before["base/seed-1"]
    assert before == {name: runs[name].status_file.read_text() for name in before}
    assert run_command(tmp_path, "status", "sweeps/mine").returncode == 0
