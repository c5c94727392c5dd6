"""Test that the status of a run is determined from its files."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import make_finished_sweep, set_status

from transformer_jax.config import Row
from transformer_jax.files import JsonObject, read_json
from transformer_jax.runs.metrics_file import format_report, read_metrics
from transformer_jax.sweeps import status as status_module
from transformer_jax.sweeps.plan import SweepRun, plan_sweep
from transformer_jax.sweeps.status import newest_evaluation, read_status, write_status


@pytest.fixture
def run(tmp_path: Path) -> SweepRun:
    sweep = plan_sweep(tmp_path / "s", {"base": Row(SMALL)}, 1)
    sweep.store()
    return sweep.runs[0]


def test_scores_belong_to_the_search_that_they_were_stored_with(run: SweepRun) -> None:
    decode = run.config.to_dict()["decode"] | {"beam_end": "any"}
    folder = run.path / "evaluations" / "test-step8-average1-beam4-alpha0.6"
    folder.mkdir(parents=True)
    scores = {"step": 8, "average_checkpoints": decode["average_checkpoints"], "decode": decode}
    (folder / "scores.json").write_text(json.dumps(scores))
    other = dataclasses.replace(run, config=run.config.change(decode={"beam_end": "any"}))
    assert newest_evaluation(other, "test") == folder
    assert newest_evaluation(run, "test") is None
    assert newest_evaluation(run, "test", any_search=True) == folder


def add_evaluation(run: SweepRun, step: int, averaged: int, *, beam_size: int = 4) -> Path:
    folder = run.path / "evaluations" / f"test-step{step}-average{averaged}-beam{beam_size}"
    folder.mkdir(parents=True)
    decode = run.config.to_dict()["decode"]
    decode |= {"average_checkpoints": averaged, "beam_size": beam_size}
    scores = {"step": step, "average_checkpoints": averaged, "decode": decode}
    (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def test_the_scores_of_a_short_run_average_fewer_checkpoints(run: SweepRun) -> None:
    changed = run.config.change(decode={"average_checkpoints": 3, "beam_size": 4})
    run = dataclasses.replace(run, config=changed)
    short = add_evaluation(run, 8, 2)
    assert newest_evaluation(run, "test") == short
    # If an evaluation averages more checkpoints than the config specifies, it used different
    # options.
    add_evaluation(run, 8, 4)
    assert newest_evaluation(run, "test") == short
    whole = add_evaluation(run, 8, 3)
    # A tool that synchronizes folders may leave a copy.
    shutil.copytree(whole, whole.with_name("test-step9-average3 (conflicted copy)"))
    # The evaluation of the average takes precedence over that of a later, single checkpoint, but
    # not over that of a later, smaller average.
    add_evaluation(run, 9, 1)
    assert newest_evaluation(run, "test") == whole
    later = add_evaluation(run, 12, 2)
    assert newest_evaluation(run, "test") == later


def test_modification_times_do_not_determine_the_scores(run: SweepRun) -> None:
    changed = run.config.change(decode={"average_checkpoints": 3, "beam_size": 4})
    run = dataclasses.replace(run, config=changed)
    own = add_evaluation(run, 8, 3)
    others = [add_evaluation(run, 8, 3, beam_size=8), add_evaluation(run, 8, 1)]
    for number, folder in enumerate(others):
        for times in ((number, number), (2**31, 2**31)):
            os.utime(folder / "scores.json", times)
            assert newest_evaluation(run, "test", any_search=True) == own


def test_a_run_without_files_is_queued(run: SweepRun) -> None:
    assert read_status(run).status == read_status(run).summary == "queued"


def test_a_run_keeps_phase_and_finished_phases_until_they_change(run: SweepRun) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    write_status(run, "running", phase="dev", finished=["train"])
    assert read_status(run).status == "running"
    write_status(run, "failed", note="disk full")
    status = read_status(run)
    assert (status.phase, status.finished) == ("dev", ("train",))
    assert status.summary == "failed, dev: disk full"
    write_status(run, "running")
    assert read_status(run).note == ""


def test_a_status_file_with_a_key_from_an_earlier_version_is_read(run: SweepRun) -> None:
    set_status(run, "failed", phase="dev", code=74, note="disk full")
    assert read_status(run).summary == "failed, dev: disk full"


def test_an_evaluation_that_is_removed_meanwhile_does_not_count(
    run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.path / "evaluations" / "dev-step8-average1"
    folder.mkdir(parents=True)
    (folder / "scores.json").touch()

    def remove_and_read(path: Path) -> JsonObject:
        path.unlink()
        return read_json(path)

    monkeypatch.setattr(status_module, "read_json", remove_and_read)
    assert newest_evaluation(run, "dev") is None


@pytest.mark.parametrize("value", ["8", None, [8], {"a": 8}, True, -8, 2**70, 8.5])
def test_values_of_unexpected_types_in_files_are_ignored(run: SweepRun, value: object) -> None:
    reports = [
        {"step": 2, "split": "train", "time": value, "flops": value},
        {"step": 4, "split": "dev", "perplexity": 5.5},
        {"step": value, "split": "dev", "perplexity": 1.0},
    ]
    run.path.mkdir()
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in reports))
    write_status(run, "running")
    decode = run.config.to_dict()["decode"]
    for name, step in (("dev-step4-average1", 4), ("dev-step8-average1", value)):
        scores = {"step": step, "average_checkpoints": decode["average_checkpoints"]}
        folder = run.path / "evaluations" / name
        folder.mkdir(parents=True)
        (folder / "scores.json").write_text(json.dumps(scores | {"decode": decode}))
    status = read_status(run)
    assert (status.step, status.perplexity, status.seconds_left) == (4, 5.5, None)
    assert status.evaluations == {"dev": run.path / "evaluations" / "dev-step4-average1"}


@pytest.mark.parametrize("since", [-5, -math.inf])
def test_reports_without_a_time_do_not_determine_the_remaining_time(
    run: SweepRun, since: float
) -> None:
    run.path.mkdir()
    reports = [{"step": step, "split": "train"} for step in (2, 4)]
    (run.path / "metrics.jsonl").write_text("".join(map(format_report, reports)))
    details = {"pid": os.getpid(), "host": os.uname().nodename}
    set_status(run, "running", **details, time=since)
    assert (read_status(run).status, read_status(run).seconds_left) == ("running", None)


def test_a_run_whose_process_is_gone_is_not_running(run: SweepRun) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = os.uname().nodename
    set_status(run, "running", pid=child.pid, host=host)
    status = read_status(run)
    assert (status.status, status.note) == ("stopped", "its process no longer exists")
    # A process with this ID exists, but it is not the one that wrote the status.
    set_status(run, "running", pid=os.getpid(), host=host, process_start="1")
    assert read_status(run).note == "its process no longer exists"


def test_a_run_on_another_machine_is_running_while_it_writes(run: SweepRun) -> None:
    details = {"pid": 1, "host": "elsewhere", "slot": "cpu 0"}
    set_status(run, "running", **details, time=time.time())
    assert read_status(run).status == "running"
    assert read_status(run).slot == ""
    # Copies of the status and the reports are new, but their contents are not.
    before = time.time() - 7200.0
    set_status(run, "running", **details, time=before)
    run.path.mkdir()
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(format_report({"step": 2, "split": "train", "time": before + 600.0}))
    assert read_status(run).status == "stopped"
    assert read_status(run).note == "the run has written nothing for 110 minutes"
    with metrics.open("a") as file:
        file.write(format_report({"step": 4, "split": "train", "time": time.time()}))
    assert read_status(run).status == "running"
    metrics.unlink()
    # The log is never a copy.
    run.log_file.touch()
    assert read_status(run).status == "running"
    os.utime(run.log_file, (before, before))
    assert read_status(run).note == "the run has written nothing for 120 minutes"


def test_a_running_run_reports_its_progress(run: SweepRun) -> None:
    write_status(run, "running", phase="train")
    run.path.mkdir()
    # The run was interrupted for a day after step 1.
    times = {1: time.time() - 86_400.0, **{step: time.time() + 10.0 * step for step in (2, 4)}}
    reports = [
        *({"split": "train", "step": step, "time": seconds} for step, seconds in times.items()),
        {"split": "dev", "step": 4, "perplexity": 7.0, "bleu": 3.0},
        {"split": "dev", "step": 6, "perplexity": 6.0},
    ]
    lines = [json.dumps(report) for report in reports]
    (run.path / "metrics.jsonl").write_text("\n".join([*lines, '{"split": "train", "st']))
    assert read_metrics(run.path / "metrics.jsonl") == reports
    status = read_status(run)
    assert (status.step, status.perplexity, status.bleu) == (6, 6.0, 3.0)
    assert status.seconds_left == pytest.approx(10.0 * (SMALL.train.steps - 4), rel=1e-3)


def test_scores_with_other_search_options_do_not_count(tmp_path: Path) -> None:
    run = make_finished_sweep(tmp_path / "s", rows=["base"]).runs[0]
    before = read_status(run).scores
    assert set(before) == {"dev", "test"}
    for split in ("dev", "test"):
        [folder] = run.path.glob(f"evaluations/{split}-*")
        other = folder.with_name(f"{split}-step8-average1-beam1-alpha0.6")
        shutil.copytree(folder, other)
        scores = json.loads((folder / "scores.json").read_text())
        scores["decode"]["beam_size"], scores["bleu"], scores["perplexity"] = 1, 3.0, 99.0
        (other / "scores.json").write_text(json.dumps(scores))
    assert read_status(run).scores == before
