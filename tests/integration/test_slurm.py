"""Slurm gets each unfinished run once; one that it ends goes on from what was saved."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Here, for its import closes what logging writes to, unless that is the present standard error.
import submitit  # noqa: F401
from small import SMALL

from transformer_jax.cli import main
from transformer_jax.config import Row
from transformer_jax.errors import UsageError
from transformer_jax.sweeps import launch, slurm, worker
from transformer_jax.sweeps.plan import Sweep, plan_sweep
from transformer_jax.sweeps.resources import Resources
from transformer_jax.sweeps.status import read_status, write_status

TESTS = Path(__file__).parents[1]
# Each submission is kept beside it; what the queue holds is a file too.
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
MINE = """
    from small import SMALL
    SWEEP = {"base": SMALL, "B": SMALL.change(model={"d_ff": 48})}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of what a Slurm was told and answers; the working directory has a sweep's config."""
    folder, work = tmp_path / "cluster", tmp_path / "work"
    for path in (folder, work):
        path.mkdir()
    scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}
    for name, script in scripts.items():
        (folder / name).write_text(script.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    (work / "mine.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return folder


def swept(*options: str) -> int:
    return main(["sweep", "mine.py", "--seeds", "2", "--launcher", "slurm", *options])


def runs() -> dict[str, Any]:
    return {run.name: read_status(run) for run in Sweep.open(Path("sweeps/mine")).runs}


def submissions(cluster: Path) -> list[str]:
    return [path.read_text() for path in sorted(cluster.glob("submitted-*"))]


def test_one_array_asks_for_what_was_said(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wishes = ["--slurm.partition", "gpu", "--slurm.time", "1-02:00:30", "--slurm.max-parallel", "3"]
    wishes += ["--slurm.gpus", "2", "--slurm.cpus", "6", "--slurm.memory-gb", "1.5"]
    wishes += ["--slurm.account", "us", "--slurm.qos", "low"]
    assert swept(*wishes) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "submitted array 70 (4 tasks, 3 at a time); this terminal may be closed",
        "next: transformer-jax status sweeps/mine",
    ]
    [script] = submissions(cluster)
    for option in (
        *("array=0-3%3", "partition=gpu", "time=1561", "gpus-per-node=2", "cpus-per-task=6"),
        *("mem=1536MB", "account=us", "qos=low", "requeue", "signal=USR2@120", "job-name=mine"),
    ):
        assert f"#SBATCH --{option}\n" in script
    assert "srun --unbuffered" in script
    assert " --cpus-per-task=6 " in script
    # One seed of every row before the next.
    assert {name: state.job for name, state in runs().items()} == {
        "base/seed-0": "70_0",
        "B/seed-0": "70_1",
        "base/seed-1": "70_2",
        "B/seed-1": "70_3",
    }
    assert main(["status", "sweeps/mine"]) == 0
    assert "4 submitted" in capsys.readouterr().out


def test_without_a_gpu_none_is_asked_for_and_one_run_is_no_array(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept("--slurm.gpus", "0", "--seeds", "1", "--rows", "base", "--slurm.time", "2") == 0
    [script] = submissions(cluster)
    assert "--gpu" not in script
    assert "--array" not in script
    # Time to save is a part of a short limit.
    assert "signal=USR2@30\n" in script
    assert runs()["base/seed-0"].job == "70"
    assert "submitted job 70 (1 task)" in capsys.readouterr().out


def test_what_waits_or_runs_is_not_submitted_again_and_what_is_gone_is(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept() == 0
    (cluster / "queue").write_text("69\n70_0\n70_1\n70_2\n70_3\n")
    base, wide, other, last = (state.run for state in runs().values())
    write_status(base, "running", doing="train", job="70_0", host="elsewhere")
    capsys.readouterr()
    assert swept() == 0
    assert "nothing to submit" in capsys.readouterr().out
    assert len(submissions(cluster)) == 1
    # Cancelled while it waited; killed while it ran; saved, and queued again by Slurm; failed.
    (cluster / "queue").write_text("70_2\n")
    write_status(other, "stopped", code=75, job="70_2")
    write_status(last, "failed", code=70, note="as it is", job="70_3")
    assert swept("--slurm.gpus", "0") == 0
    assert "array=0-1%2\n" in submissions(cluster)[1]
    jobs = {name: state.job for name, state in runs().items()}
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
    assert swept() == 1
    assert "1 of 4 runs failed: B/seed-1; the same command with --retry" in capsys.readouterr().err
    assert swept("--retry-failed") == 0
    assert {name: state.job for name, state in runs().items() if state.name == "submitted"} == {
        "B/seed-1": "72"
    }


def test_the_local_launcher_leaves_what_slurm_has_and_takes_what_it_lost(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert swept() == 0
    (cluster / "queue").write_text("70_0\n70_1\n")
    taken = []

    def begin(run: Any, *_: Any) -> subprocess.Popen[bytes]:
        taken.append(run.name)
        write_status(run, "failed", note="tried")
        return subprocess.Popen(["true"])

    monkeypatch.setattr("transformer_jax.sweeps.launch.begin", begin)
    assert main(["sweep", "mine.py", "--seeds", "2"]) == 1
    assert taken == ["base/seed-1", "B/seed-1"]


@pytest.mark.parametrize(
    ("options", "told", "code"),
    [
        (["--slurm.time", "soon"], "--slurm.time must be minutes, HOURS:MINUTES:SECONDS or", 2),
        (["--slurm.time", "0"], "--slurm.time must be", 2),
        (["--slurm.time", "30:00"], "--slurm.time must be", 2),
        (["--slurm.max-parallel", "0"], "--slurm.max-parallel must be at least 1, got 0", 2),
        (["--slurm.gpus", "-1"], "--slurm.gpus must be at least 0, got -1", 2),
        (["--slurm.gpus", "some"], "--slurm.gpus must be an integer, got 'some'", 2),
        (["--slurm.memory-gb", "nan"], "--slurm.memory-gb must be positive, got nan", 2),
        (["--slurm.partitoin", "x"], "did you mean --slurm.partition?", 2),
        (["--devices", "2"], "--slurm.max-parallel takes --devices' place", 2),
        (["--launcher", "local", "--slurm.gpus", "0"], "need --launcher slurm", 2),
        (["--launcher", "slrum"], "did you mean 'slurm'?", 2),
        (["refuses"], "Slurm refuses: sbatch: error: Invalid partition", 2),
        (["silent"], "Slurm does not answer: slurm_load_jobs error: no controller", 69),
        (["sbatch"], "no sbatch on the path: only a machine of Slurm's can ask Slurm", 69),
        (["squeue"], "no squeue on the path", 69),
        (["submitit"], "--launcher slurm needs submitit: pip install '.[slurm]'", 2),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_submitted(
    options: list[str],
    told: str,
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
    assert swept(*(option for option in options if len(options) > 1)) == code
    # Text may be made ready before Slurm refuses.
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1
    assert told in lines[0]
    assert not submissions(cluster)


def test_a_dry_run_asks_nobody_and_makes_nothing(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "srun"):
        (cluster / name).unlink()
    assert swept("--dry-run") == 0
    out = capsys.readouterr().out
    assert "2 rows x 2 seeds = 4 runs by Slurm, 8 at a time" in out
    assert "12:00:00" in out
    assert [path.name for path in Path().iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("12:00:00", 720), ("0:00:30", 1), ("2-1:30:00", 2970), ("1:00:01", 61)],
)
def test_a_limit_of_time_is_read_as_sbatch_reads_it(time: str, minutes: int) -> None:
    assert Resources(time=time).minutes == minutes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that is submitted as job 7_0; this process is that job's."""
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1)
    sweep.store()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    write_status(sweep.runs[0], "submitted", job="7_0")
    return sweep.runs[0]


def task(run: Any, vain: int = 0) -> slurm.Task:
    return slurm.Task(str(run.sweep), run.name, 60.0, vain)


def test_a_task_that_the_state_does_not_name_does_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "NOTE_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "begin", lambda *_: pytest.fail("it began"))
    write_status(run, "submitted", job="8_0")
    with pytest.raises(UsageError, match=r"base/seed-0 was left to job 8_0"):
        task(run)()


@pytest.fixture
def doing(run: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Let the run's task have this program for its worker; return its exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def do(program: str) -> int:
        command = [sys.executable, "-c", f"import os, signal; {program}"]
        monkeypatch.setattr(launch, "train_command", lambda *_: command)
        with pytest.raises(SystemExit) as end:
            task(run)()
        return int(end.value.code or 0)

    yield do
    signal.signal(signal.SIGTERM, before)


def test_a_worker_that_is_lost_without_a_word_is_noted(
    run: Any, doing: Callable[[str], int]
) -> None:
    assert doing("os.kill(os.getpid(), 9)") == 75
    assert (read_status(run).status, read_status(run).note) == (
        "stopped",
        "its process ended with -9",
    )


def test_what_slurm_says_to_end_a_task_ends_its_worker_and_leaves_the_rest_to_slurm(
    run: Any, doing: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lingered: list[float] = []
    # It waits for the exit code of what saves, and then for whatever Slurm does.
    monkeypatch.setattr(slurm.time, "sleep", lingered.append)
    saves = "signal.signal(15, lambda *_: os._exit(75)); os.kill(os.getppid(), 15); signal.pause()"
    assert doing(saves) == 75
    assert lingered == [slurm.LINGER_SECONDS]
    assert read_status(run).note.startswith("Slurm ended job 7_0")


def test_the_signal_of_the_limit_is_not_for_a_worker(doing: Callable[[str], int]) -> None:
    # Where Slurm gives it to every process, one that does not know it would be killed.
    assert doing("os.kill(os.getpid(), signal.SIGUSR2); os._exit(3)") == 3


def test_what_gets_no_further_three_times_has_failed_and_what_does_goes_on(run: Any) -> None:
    again = task(run, vain=1).checkpoint()
    assert again.function.__dict__ == task(run, vain=2).__dict__
    assert (read_status(run).status, read_status(run).phase) == ("submitted", "job 7_0")
    (run.path / "checkpoints" / "12").mkdir(parents=True)
    assert task(run, vain=2).checkpoint().function.vain == 0
    (run.path / "checkpoints" / "12").rmdir()
    assert task(run, vain=2).checkpoint() is None
    assert read_status(run).status == "failed"
    assert "more --slurm.time" in read_status(run).note
    write_status(run, "done")
    assert task(run).checkpoint() is None


# Whatever runs with this on its path does as the name of its run says.
FAULTS = """
    import os, sys
    if sys.argv[1:2] in (["train"], ["resume"]):
        from transformer_jax.distributed import heartbeat
        beat, words = heartbeat.beat, " ".join(sys.argv)
        def disturbed(step):
            beat(step)
            if step >= 6 and "/base/seed-1" in words and not os.path.exists("mended"):
                raise RuntimeError("of no kind we know")
        heartbeat.beat = disturbed
"""
REAL = """
    from small import SMALL
    BASE = SMALL.change(train={"steps": 24, "checkpoint_every": 12}, data={"num_pairs": 100})
    SWEEP = {"base": BASE, "B": BASE.change(model={"d_ff": 48})}
"""
LONG = """
    SWEEP["long"] = BASE.change(train={"steps": 1000})
"""


def called(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(textwrap.dedent(REAL + LONG))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    return subprocess.run(
        [sys.executable, "-m", "transformer_jax", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
    )


def wait_until(what: Any, seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.5)


@pytest.mark.slurm
@pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="SLURM_CONF names no cluster")
def test_on_a_cluster_runs_fail_alone_and_go_on_where_slurm_ended_them(tmp_path: Path) -> None:
    options = ["sweep", "mine.py", "--seeds", "2", "--launcher", "slurm", "--slurm.gpus", "0"]
    began = called(tmp_path, *options)
    assert began.returncode == 0, began.stderr
    assert "(6 tasks, 8 at a time); this terminal may be closed" in began.stdout
    [number] = [line.split()[2] for line in began.stdout.splitlines() if "array" in line]
    found = {run.name: run for run in Sweep.open(tmp_path / "sweeps" / "mine").runs}

    def states() -> dict[str, str]:
        return {name: read_status(run).status for name, run in found.items()}

    def end(name: str, *command: str) -> None:
        """Do this to a run that has saved something; wait until it has saved where it is."""
        wait_until(lambda: any((found[name].path / "checkpoints").glob("[0-9]*")))
        subprocess.run(["scontrol", *command], check=True)
        wait_until(lambda: states()[name] in ("submitted", "stopped"))
        assert "SIGTERM: saved at step" in found[name].log.read_text()

    # The limit of time comes so near that Slurm gives its signal.
    end("long/seed-0", "update", f"JobId={number}_2", "TimeLimit=1")
    wait_until(lambda: states()["long/seed-0"] == "submitted")
    subprocess.run(["scontrol", "update", f"JobId={number}_2", "TimeLimit=720"], check=True)
    end("long/seed-1", "requeue", f"{number}_5")
    # All of them are there still: in the queue, at work, done, or failed.
    again = called(tmp_path, *options)
    assert "nothing to submit" in again.stdout
    # Slurm lets what is queued again wait for two minutes.
    wait_until(lambda: set(states().values()) == {"done", "failed"})
    assert [name for name, state in states().items() if state == "failed"] == ["base/seed-1"]
    assert read_status(found["base/seed-1"]).note.endswith("RuntimeError: of no kind we know")
    for name in ("long/seed-0", "long/seed-1"):
        lines = (found[name].path / "metrics.jsonl").read_text().splitlines()
        steps = [line["step"] for line in map(json.loads, lines) if line["split"] == "train"]
        # None twice: it went on from what it saved.
        assert steps == sorted(set(steps))
        assert steps[-1] == 1000
    kept = {name: run.state.read_text() for name, run in found.items()}
    refused = called(tmp_path, *options)
    assert refused.returncode == 1
    assert "1 of 6 runs failed: base/seed-1" in refused.stderr
    (tmp_path / "mended").touch()
    retried = called(tmp_path, *options, "--retry-failed")
    assert "(1 task)" in retried.stdout, retried.stderr
    wait_until(lambda: set(states().values()) == {"done"})
    del kept["base/seed-1"]
    assert kept == {name: found[name].state.read_text() for name in kept}
    assert called(tmp_path, "status", "sweeps/mine").returncode == 0


@pytest.mark.parametrize(("job", "name"), [("7_0", "done"), ("8_0", "running")])
def test_a_job_that_is_queued_again_on_another_node_goes_on_with_its_own_run_alone(
    job: str, name: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "jobs", lambda _: [])
    write_status(run, "running", job=job, host="a node that is gone")
    worker.run_worker(run, 60.0)
    assert read_status(run).status == name
