"""Test that a sweep trains and scores its runs, reports failures, and resumes if interrupted."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_configs import metrics_of, read_pairs

from transformer_jax import commands
from transformer_jax.cli import main
from transformer_jax.config import Row
from transformer_jax.config.loading import load_rows
from transformer_jax.files import read_json
from transformer_jax.sweeps.estimates import remaining_runs
from transformer_jax.sweeps.plan import Sweep, plan_sweep
from transformer_jax.sweeps.status import RunStatus, read_status, write_status

SUPPORT = Path(__file__).parents[1] / "support"
# If this `sitecustomize.py` is on the Python path, some trainers fail, each in a different way.
FAULTS = """
    import os, signal, sys, time
    from transformer_jax.distributed import heartbeat
    beat, busy, words = heartbeat.beat, heartbeat.busy, " ".join(sys.argv)
    beats = 0
    is_training = any(word in sys.argv[1:2] for word in ("train", "resume"))
    if is_training and "/C/seed-1" in words:
        from transformer_jax.training import optimizer
        make_schedule = optimizer.learning_rate_schedule
        optimizer.learning_rate_schedule = lambda *a: lambda step: 1e30 * make_schedule(*a)(step)
    def count_phase(phase):
        global beats
        beats = 0
        busy(phase)
    def fail(step):
        global beats
        beats += 1
        beat(step)
        if step < 6 or os.path.exists("mended"):
            return
        if "/base/seed-1" in words:
            raise RuntimeError("of an unknown kind")
        if "/B/seed-0" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        # The supervisor must know the duration of a step first.
        if "/B/seed-1" in words and beats > 6:
            time.sleep(600)
    heartbeat.beat, heartbeat.busy = fail, count_phase
"""
CONFIG = """
    from example_configs import SMALL
    BASE = SMALL.change(train={"steps": 24, "checkpoint_every": 12})
    SWEEP = {
        "base": BASE,
        "B": BASE.change(model={"d_k": 4}),
        "C": BASE.change(model={"d_ff": 48}),
    }
"""


def start_sweep(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a sweep of `CONFIG` in the given folder."""
    (folder / "mine.py").write_text(textwrap.dedent(CONFIG))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    return subprocess.Popen(
        [sys.executable, "-m", "transformer_jax", "sweep", "mine.py", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{SUPPORT.parents[1]}:{SUPPORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_sweep(folder: Path, *options: str) -> tuple[int, str, str]:
    """Run a sweep and return its exit code, standard output, and standard error."""
    process = start_sweep(folder, "--step-timeout", "20", *options)
    out, err = process.communicate(timeout=1800)
    return process.returncode, out, err


def statuses_in(folder: Path) -> dict[str, RunStatus]:
    """Return the status of each run, keyed by the run's name."""
    return {run.name: read_status(run) for run in Sweep.open(folder / "sweeps" / "mine").runs}


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds; fail if the process ends first, or after 400 s."""
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


# The faster tests of the launcher, the worker, and the report do not train models.
@pytest.mark.slow
def test_a_sweep_trains_scores_and_reports_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without a test set, the run is scored on one split. The next test scores runs on two splits.
    config = (
        "from example_configs import SMALL\nSWEEP = {'base': SMALL.change(data={'test': None})}\n"
    )
    (tmp_path / "mine.py").write_text(config)
    monkeypatch.chdir(tmp_path)
    # The text is short, so all batches have the same shape, and scoring is fast.
    pairs = zip(*read_pairs("train")[:60], strict=True)
    for language, side in zip(("en", "de"), pairs, strict=True):
        Path(f"text.{language}").write_text("".join(f"{line}\n" for line in side), "utf-8")
    options: list[str] = []
    for split in ("train", "dev"):
        options += [f"--data.{split}", "text.en", "text.de"]
    # With greedy search, which training also uses, scoring does not compile a second search.
    options += ["--train.steps", "4", "--decode.beam-size", "1"]
    # With 1e-6 times the paper's rate, the model does not learn, so 1 is chosen for each row.
    tune = ["--tune", "train.learning-rate-scale", "1e-6", "1"]
    assert main(["sweep", "mine.py", "--seeds", "1", *tune, *options]) == 0
    assert "1 done" in capsys.readouterr().out
    sweep = Sweep.open(Path("sweeps/mine"))
    assert [read_status(run).status for run in sweep.trials] == ["done", "done"]
    [status] = [read_status(run) for run in sweep.runs]
    assert status.run.config.train.learning_rate_scale == 1
    assert status.finished == ("train", "dev")
    dev = [report for report in metrics_of(status.run.path) if report["split"] == "dev"][-1]
    assert status.scores["dev"]["perplexity"] == pytest.approx(dev["perplexity"], rel=1e-5)
    assert main(["status", "sweeps/mine"]) == 0
    assert "3 done" in capsys.readouterr().out
    assert main(["report", "sweeps/mine"]) == 0
    assert "written to sweeps/mine/report" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timeout(5400)
def test_four_failures_of_six_runs_do_not_affect_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_sweep(tmp_path, "--seeds", "2")
    assert code == 1, err
    assert "2 done, 4 failed" in out or "4 failed, 2 done" in out
    statuses = statuses_in(tmp_path)
    failed = {name: s.note for name, s in statuses.items() if s.status == "failed"}
    assert set(failed) == {"base/seed-1", "B/seed-0", "B/seed-1", "C/seed-1"}
    assert {s.status for name, s in statuses.items() if name not in failed} == {"done"}
    assert set(statuses["base/seed-0"].scores) == {"dev", "test"}
    assert failed["base/seed-1"].endswith("RuntimeError: of an unknown kind")
    assert "SIGKILL ended training after step" in failed["B/seed-0"]
    assert "no heartbeat for" in failed["B/seed-1"]
    assert "smaller train.learning_rate_scale" in failed["C/seed-1"]
    assert "4 of 6 runs failed" in err.splitlines()[-1]
    # Finished runs are never repeated, and failed runs are repeated only with `--retry-failed`.
    before = {name: s.run.status_file.read_text() for name, s in statuses.items()}
    assert run_sweep(tmp_path, "--seeds", "2")[0] == 1
    assert before == {n: s.run.status_file.read_text() for n, s in statuses_in(tmp_path).items()}
    (tmp_path / "mended").touch()
    assert run_sweep(tmp_path, "--seeds", "2", "--retry-failed")[0] == 1
    statuses = statuses_in(tmp_path)
    assert {name for name, s in statuses.items() if s.status != "done"} == {"C/seed-1"}
    for name, status in statuses.items():
        if name not in failed:
            assert before[name] == status.run.status_file.read_text()
        if status.status == "done":
            dev = [x for x in metrics_of(status.run.path) if x["split"] == "dev"][-1]
            assert status.scores["dev"]["perplexity"] == pytest.approx(dev["perplexity"], rel=1e-5)
    capsys.readouterr()
    folder = str(tmp_path / "sweeps" / "mine")
    assert main(["status", folder]) == 1
    shown = capsys.readouterr()
    assert "5 done, 1 failed" in shown.out
    assert (
        "1 of 6 runs failed: C/seed-1; to train them again, repeat the sweep with --retry"
        in shown.err
    )
    assert main(["report", folder]) == 0


@pytest.mark.exhaustive
def test_an_interrupted_sweep_saves_its_runs(tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    process = start_sweep(tmp_path, "--seeds", "1", "--rows", "base", "--train.steps", "4000")
    metrics = tmp_path / "sweeps" / "mine" / "base" / "seed-0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    assert statuses_in(tmp_path)["base/seed-0"].status == "running"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 75, err
    assert "run the same command to resume the sweep" in err
    status = statuses_in(tmp_path)["base/seed-0"]
    assert status.status == "stopped"
    assert 0 < status.step < 4000
    run = read_json(status.run.path / "run.json")
    assert run["config"]["train"]["steps"] == 4000


@pytest.mark.exhaustive
def test_a_run_that_is_interrupted_before_its_first_step_resumes(tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    options = ["--seeds", "1", "--rows", "base"]
    process = start_sweep(tmp_path, *options)
    status_file = tmp_path / "sweeps" / "mine" / "base" / "seed-0.state"
    wait_until(lambda: status_file.exists() and "running" in status_file.read_text(), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 75, err
    assert statuses_in(tmp_path)["base/seed-0"].status == "stopped", err
    assert run_sweep(tmp_path, *options)[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_seeds_that_train_in_one_program_have_ordinary_runs(tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    options = ["--seeds", "2", "--rows", "base", "--group", "2", "--devices", "1"]
    process = start_sweep(tmp_path, *options)
    runs = [tmp_path / "sweeps" / "mine" / "base" / f"seed-{seed}" for seed in (0, 1)]
    metrics = runs[1] / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    assert {s.status for s in statuses_in(tmp_path).values()} == {"running"}
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 75, err
    for status in statuses_in(tmp_path).values():
        assert status.status == "stopped"
        assert status.note.endswith("repeat the sweep to resume")
    code, out, err = run_sweep(tmp_path, *options)
    assert code == 0, err
    assert "base/seed-0, base/seed-1: on cpu 0" in err
    assert "2 done" in out
    for run in runs:
        assert read_json(run / "run.json")["group"] == 2
        assert [x["step"] for x in metrics_of(run) if x["split"] == "dev"] == [12, 24]
        log = run.with_name(f"{run.name}.log").read_text()
        assert log.count("step 24/24  dev") == 1
        assert f"run stored in {Path('sweeps/mine/base') / run.name}" in log
        assert main(["evaluate", str(run), "--split", "dev"]) == 0


def test_options_of_rows_apply_before_options_of_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = """
        from example_configs import SMALL
        CONFIG = SMALL.change(data={"num_pairs": 150}, train={"steps": 9, "log_every": 3})
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "other.py").write_text(textwrap.dedent(other))
    monkeypatch.chdir(tmp_path)
    sections = ["--data-from", "other.py", "--train-from", "other.py", "--scale", "half"]
    fields = ["--train.steps", "12", "--data.num-pairs", "160"]
    # Record the sweep's rows instead of training their models.
    calls: list[dict[str, Row]] = []
    monkeypatch.setattr(commands.sweeps.Sweep, "run", lambda _, rows: calls.append(rows))
    assert main(["sweep", "mine.py", *sections, *fields]) == 0
    configs = {name: row.config for name, row in calls[0].items()}
    assert {config.data.num_pairs for config in configs.values()} == {160}
    assert {(c.train.steps, c.train.log_every) for c in configs.values()} == {(12, 3)}
    assert (configs["base"].model.d_ff, configs["C"].model.d_ff) == (16, 24)
    capsys.readouterr()
    assert main(["sweep", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}-from CONFIG" in shown for name in ("data", "train", "decode"))
    assert "--scale {full,half,small,tiny}" in shown


def test_two_sweeps_of_one_config_file_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from example_configs import SMALL\nSWEEP = {'base': SMALL}\n"
    )
    monkeypatch.chdir(tmp_path)
    # Store the plan instead of training any models.
    monkeypatch.setattr(commands.sweeps.Sweep, "_launch", lambda _, sweep: sweep.store())
    wide = ["sweep", "mine.py", "--model.d-ff", "48"]
    for arguments in (["sweep", "mine.py"], wide, wide):
        assert main(arguments) == 0
    assert {path.name for path in Path("sweeps").iterdir()} == {"mine", "mine-2"}
    notes = capsys.readouterr().err
    note = "sweeps/mine contains a sweep with different configs; this one is in sweeps/mine-2"
    assert notes.count(note) == 2
    # The stored plan lists each command only once.
    sweeps = [Sweep.open(Path("sweeps") / name) for name in ("mine", "mine-2")]
    assert [[origin.command for origin in sweep.origins] for sweep in sweeps] == [
        ["transformer-jax sweep mine.py"],
        ["transformer-jax sweep mine.py --model.d-ff 48"],
    ]
    assert main([*wide, "--out", "sweeps/mine"]) == 2
    assert "row base with a different config (model.d_ff 32 -> 48)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py", "--rows", "A"], "no row 'A'"),
        (["mine.py", "--seeds", "0"], "seeds must be from 1 to 10000"),
        (["mine.py", "--seeds", "9" * 20], "seeds must be from 1 to 10000"),
        (["mine.py", "--devices", "many"], "--devices must be"),
        (["mine.py", "--group", "0"], "--group must be positive, got 0"),
        (["mine.py", "--launcher", "slurm", "--group", "2"], "need --launcher local"),
        (["mine.py", "--runs-per-device", "2"], "several runs can share a GPU, but not a CPU"),
        (["mine.py", "--step-timeout", "nan"], "--step-timeout must be positive, got nan"),
        (["mine.py", "--scale", "huge"], "--scale must be one of"),
        (["mine.py", "--data-from", "nowhere"], "no config file nowhere"),
        (["mine.py", "--train-from"], "--train-from"),
        (["mine.py", "other.py"], "other.py and an earlier file define row"),
        (["mine.py", "--out", "mine.py", "--dry-run"], "mine.py is not a sweep"),
        (["nothing"], "no config file nothing"),
        ([], "sweep needs"),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_creates_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "other.py").write_text(
        "from example_configs import SMALL\nSWEEP = {'base': SMALL}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert [line for line in err.splitlines() if "note:" not in line] == [err.splitlines()[-1]]
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "other.py"}


def test_a_dry_run_prints_what_a_sweep_needs_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CONFIG))
    monkeypatch.chdir(tmp_path)
    with Path("mine.py").open("a", encoding="utf-8") as file:
        file.write("SWEEP['longer-than-eight'] = BASE.change(train={'steps': 10**9})\n")
    assert main(["sweep", "mine.py", "--rows", "B", "longer-than-eight", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "3 rows x 3 seeds = 9 runs" in out
    lines = [line for line in out.splitlines() if line.endswith(" GB per run")]
    assert re.match(
        r"  B +(less than 1|up to about .*) min and about +0\.\d\d GB per run", lines[1]
    )
    assert len(lines) == 3
    assert len({line.index(" and about") for line in lines}) == 1
    estimate = r"^up to about .* of training for the remaining 9 of 9 runs, if training reaches 30%"
    assert re.search(estimate, out, re.MULTILINE)
    assert re.search(r"^about \d+\.\d GB on disk \(free: \d+\)$", out, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_dry_run_counts_only_the_training_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CONFIG))
    monkeypatch.chdir(tmp_path)
    rows = load_rows("mine.py")
    sweep = plan_sweep(tmp_path / "sweeps" / "mine", rows, 3, only=["B"])
    sweep.store()
    finished, partial, failed, *_ = sweep.runs
    write_status(finished, "done")
    write_status(failed, "failed")
    partial.path.mkdir()
    step = partial.config.train.steps // 2
    (partial.path / "metrics.jsonl").write_text(f'{{"split": "train", "step": {step}}}\n')
    assert remaining_runs(sweep, retry_failed=True) == {"base": 2, "B": 2.5}
    command = ["sweep", "mine.py", "--rows", "B", "--dry-run"]
    assert main(command) == 0
    assert "of training for the remaining 3.5 of 6 runs" in capsys.readouterr().out
    assert main([*command, "--retry-failed"]) == 0
    assert "of training for the remaining 4.5 of 6 runs" in capsys.readouterr().out


def test_a_dry_run_refuses_what_the_folder_of_another_sweep_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CONFIG))
    monkeypatch.chdir(tmp_path)
    plan_sweep(tmp_path / "old", load_rows("mine.py"), 1).store()
    command = ["sweep", "mine.py", "--out", "old", "--dry-run"]
    assert main([*command, "--seeds", "2"]) == 0
    for options, message in (
        (["--tune", "train.learning_rate_scale", "0.5", "1"], "the sweep in old tunes nothing"),
        (["--train.steps", "7"], "train.steps"),
    ):
        capsys.readouterr()
        assert main([*command, *options]) == 2
        assert message in (err := capsys.readouterr().err)
        assert "--out FOLDER" in err
        assert main([*command[:-1], *options]) == 2
        assert capsys.readouterr().err == err


@pytest.fixture
def _folder_with_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary working directory that contains the config file mine.py."""
    (tmp_path / "mine.py").write_text("from example_configs import SMALL as CONFIG\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_folder_with_config")
def test_a_sweep_warns_before_it_reads_its_text_more_than_100_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Replace the launcher with a stub that does not train anything.
    monkeypatch.setattr("transformer_jax.api.launch", lambda *_, **__: [])
    for steps, is_warned in (("400", False), ("405", True)):
        assert main(["sweep", "mine.py", "--out", steps, "--train.steps", steps]) == 0
        err = capsys.readouterr().err
        assert ("warning: 405 steps are 101 passes over the training set" in err) is is_warned


@pytest.mark.slow
@pytest.mark.usefixtures("_folder_with_config")
def test_a_dry_run_warns_if_the_disk_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for free, is_warned in ((10**12, False), (10**5, True)):
        usage = shutil._ntuple_diskusage(10**12, 10**12 - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert main(["sweep", "mine.py", "--dry-run"]) == 0
        assert ("GB does not fit in the 0 GB" in capsys.readouterr().err) is is_warned
    # The folder can be on another disk.
    disk = Path("disk")
    disk.mkdir()
    disks = {disk.resolve(): shutil._ntuple_diskusage(10**12, 10**12 - 7 * 10**9, 7 * 10**9)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disks[path.resolve()])
    assert main(["sweep", "mine.py", "--dry-run", "--out", "disk"]) == 0
    assert "(free: 7)" in capsys.readouterr().out
