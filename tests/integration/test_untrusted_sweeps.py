"""Test that damaged and malicious sweeps cause one-line errors and cannot write elsewhere."""

import csv
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import collect, make_finished_sweep

from transformer_jax.cli import main
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import read_json, write_json
from transformer_jax.reports.report import write_report
from transformer_jax.sweeps.plan import Origin, Sweep, SweepRun
from transformer_jax.sweeps.status import read_status


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that tests may modify. It has no test scores, so reports do not test sentences."""
    return make_finished_sweep(tmp_path / "sweeps" / "s", rows=["base", "worse"], splits=["dev"])


def change_state(run: SweepRun, **values: object) -> None:
    state = {"status": "done", "host": os.uname().nodename, **values}
    run.status_file.write_text(json.dumps(state))


def change_scores(run: SweepRun, **values: object) -> None:
    [path] = run.path.glob("evaluations/dev-*/scores.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def replace_file(path: Path, target: str) -> None:
    """Replace a file with a link to `target`, or with a pipe if `target` is empty."""
    path.unlink(missing_ok=True)
    if target:
        path.symlink_to(target)
    else:
        os.mkfifo(path)


def text_of(run: SweepRun, name: str) -> Path:
    return next(run.path.glob(f"evaluations/dev-*/{name}"))


DAMAGE: dict[str, tuple[Callable[[SweepRun], object], str]] = {
    "a number of finished phases": (lambda r: change_state(r, finished=5), "phases are 5"),
    "no finished phases": (lambda r: change_state(r, finished=None), "phases are None"),
    "an unknown phase": (lambda r: change_state(r, finished=["x"]), "phases are ['x']"),
    "an unknown status": (lambda r: change_state(r, status="zzz"), "status is 'zzz'"),
    "a list as the status": (lambda r: change_state(r, status=[1]), "status is [1]"),
    "a negative perplexity": (lambda r: change_scores(r, perplexity=-1.0), "perplexity is -1.0"),
    "a perplexity of zero": (lambda r: change_scores(r, perplexity=0), "perplexity is 0"),
    "a BLEU score of NaN": (lambda r: change_scores(r, bleu=math.nan), "bleu is nan"),
    "a huge BLEU score": (lambda r: change_scores(r, bleu=1e308), "bleu is 1e+308"),
    "an infinite F1 score": (
        lambda r: change_scores(r, task={"main_score": "f1", "f1": math.inf}),
        "f1 is inf",
    ),
    "a status file without end": (lambda r: replace_file(r.status_file, "/dev/zero"), "a link"),
    "a status file that is a pipe": (lambda r: replace_file(r.status_file, ""), "special file"),
    "a linked log": (lambda r: replace_file(r.log_file, "/etc/passwd"), "a link"),
    "a lock that is a pipe": (lambda r: replace_file(r.path / "lock", ""), "special file"),
    "metrics that are a pipe": (lambda r: replace_file(r.path / "metrics.jsonl", ""), "special"),
    "a linked run": (
        lambda r: (r.path.rename(r.path.with_name("x")), r.path.symlink_to("x")),
        "a link",
    ),
    "linked scores": (lambda r: replace_file(text_of(r, "scores.json"), "/dev/zero"), "a link"),
    "translations in a pipe": (
        lambda r: replace_file(text_of(r, "hypothesis.txt"), ""),
        "special file",
    ),
    "too few translations": (
        lambda r: text_of(r, "hypothesis.txt").write_text(""),
        "0 translations but 60 references",
    ),
    "no translations": (lambda r: text_of(r, "hypothesis.txt").unlink(), "cannot be read"),
    "translations in another encoding": (
        lambda r: text_of(r, "hypothesis.txt").write_bytes(b"\xff\n" * 60),
        "not UTF-8",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.trials("a damaged run in a sweep")
def test_a_damaged_run_is_listed_with_the_reason_and_the_others_are_reported(
    name: str, dev_sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = DAMAGE[name]
    damage(dev_sweep.find("base/seed-0"))
    assert main(["report", str(dev_sweep.path)]) == 0
    printed = capsys.readouterr().out
    assert "base/seed-0" in printed
    assert reason in printed
    table = (dev_sweep.path / "report" / "runs.csv").read_text()
    runs = list(csv.reader(table.splitlines()))[1:]
    assert [run[1] for run in runs].count("done") == 5
    assert runs[0][:2] == ["base/seed-0", "unreadable"]
    code = main(["status", str(dev_sweep.path)])
    if "translations" not in name or "pipe" in name:
        # The `status` command does not read the translations.
        assert code == 1
        out, err = capsys.readouterr()
        assert reason in out
        assert "5 done" in out
        assert "1 of 6 runs cannot be read: base/seed-0" in err


@pytest.mark.parametrize("pid", [[1], 10**30, math.inf, -1, 0, "1", None])
def test_a_process_id_that_cannot_exist_is_that_of_a_lost_process(
    pid: object, dev_sweep: Sweep
) -> None:
    run = dev_sweep.find("base/seed-0")
    change_state(run, status="running", pid=pid)
    assert read_status(run).summary == "stopped: its process no longer exists"


def test_a_line_of_a_translation_can_contain_a_carriage_return(dev_sweep: Sweep) -> None:
    run = dev_sweep.find("base/seed-0")
    lines = text_of(run, "hypothesis.txt").read_text().split("\n")
    text_of(run, "hypothesis.txt").write_bytes("\n".join(["a\rb", *lines[1:]]).encode())
    assert collect(dev_sweep).base.missing == {}


@pytest.mark.parametrize("linked", ["report", "report/table.csv", "report/curves.svg", "x"])
def test_a_report_does_not_write_through_links(
    linked: str, dev_sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("precious")
    link = dev_sweep.path / linked
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(other if linked == "report" else other / "file")
    results = collect(dev_sweep)
    assert main(["report", str(dev_sweep.path)]) == 74
    assert f"{link} is a link" in capsys.readouterr().err
    if linked != "x":
        with pytest.raises(StorageError, match="is a link"):
            write_report(results)
    assert [path.name for path in other.iterdir()] == ["file"]
    assert (other / "file").read_text() == "precious"


def test_no_file_of_a_report_contains_control_characters(dev_sweep: Sweep) -> None:
    origin = Origin("\x1b]0;owned\x07", "")
    folder = write_report(collect(replace(dev_sweep, origins=[origin])))
    assert r"\x1b]0;owned\x07" in (folder / "index.html").read_text()
    text = [path for path in folder.iterdir() if path.suffix != ".pdf"]
    assert not any(b"\x1b" in path.read_bytes() for path in text)


@pytest.mark.parametrize("value", ["<script>", 0, -3.0, [1], math.nan, True])
def test_the_papers_results_must_be_positive_numbers(value: object, dev_sweep: Sweep) -> None:
    path = dev_sweep.path / "sweep.json"
    plan = read_json(path)
    plan["rows"]["worse"]["paper"]["perplexity"] = value
    write_json(path, plan)
    with pytest.raises(StorageError, match="the paper's perplexity must be a positive, finite"):
        Sweep.open(dev_sweep.path)


def test_a_report_without_a_readable_run_names_the_reason(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        change_state(run, status="zzz")
    with pytest.raises(UsageError, match=r"base/seed-0 is unreadable: .* its status is 'zzz'"):
        collect(dev_sweep)
