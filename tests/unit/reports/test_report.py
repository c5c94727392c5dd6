"""Test that a report has the same results in every format."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pictures import Page
from run_files import HOSTILE, RESULTS, collect, make_finished_sweep, set_status

from transformer_jax.api import report
from transformer_jax.cli import main
from transformer_jax.config import Paper
from transformer_jax.errors import UsageError
from transformer_jax.reports.footnotes import list_footnotes
from transformer_jax.reports.report import (
    COMPARISONS,
    SCORES,
    list_comparisons,
    make_run_table,
    make_table,
    write_report,
)
from transformer_jax.sweeps.plan import Sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep in which one run failed and all others are done. Tests must not modify this sweep."""
    sweep = make_finished_sweep(tmp_path_factory.mktemp("report") / "s")
    set_status(sweep.runs[-1], "failed", phase="train", note=HOSTILE)
    return sweep


@pytest.fixture(scope="module")
def folder(sweep: Sweep) -> Path:
    """The folder that contains the sweep's report."""
    return write_report(collect(sweep))


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that tests may modify. It has no test scores, so reports do not test sentences."""
    return make_finished_sweep(tmp_path / "sweeps" / "s", rows=["base", "worse"], splits=["dev"])


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.reader(file))


def test_names_and_reasons_are_plain_text_in_every_format(folder: Path) -> None:
    files = [(folder / name).read_text() for name in ("index.html", "table.tex", "table.md")]
    page = Page(files[0])
    assert HOSTILE in page.text
    assert "b" not in page.tags
    assert page.tags.count("details") == page.tags.count("summary") == 6
    assert page.tags.count("figcaption") == 2
    # The page shows rounded scores.
    assert not re.search(r"\d\.\d{5}", page.text)
    assert "script" not in page.tags
    assert not any(HOSTILE in text for text in files)
    assert "<b>" not in "".join(files)


def test_the_page_answers_before_it_shows_tables(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    places = [
        text.index(x)
        for x in (
            "Which of the 4 other rows differ from base",
            "These answers use the test set.",
            "<figure>",
            "<dt>worse: d_ff 34</dt>",
            "<details>",
            "<table>",
        )
    ]
    assert places == sorted(places)
    assert (folder / "ratios.pdf").read_bytes().startswith(b"%PDF")


def test_the_report_can_have_another_baseline_and_only_one_set(sweep: Sweep) -> None:
    other = report(sweep.path, split="dev", baseline="worse").results
    assert other.base.name == "worse"
    assert other.splits == ("dev",)
    assert {x.status for x in other.statuses} == {"done", "failed"}
    usual = report(sweep.path).results
    assert usual.splits == ("dev", "test")
    both = [other.compare("base", "bleu"), usual.compare("worse", "bleu")]
    assert both[0].difference == pytest.approx(-(both[1].difference or 0.0))
    # The test scores of these runs are the development scores plus a constant.
    assert usual.compare("worse", "bleu", "test").difference == pytest.approx(both[1].difference)
    with pytest.raises(UsageError, match="no row 'best'"):
        report(sweep.path, baseline="best")


def test_the_tables_name_the_baseline(sweep: Sweep) -> None:
    results = report(sweep.path, split="dev", baseline="worse").results
    scores, comparisons = (make_table(results, x) for x in (SCORES, COMPARISONS["dev"]))
    change = scores[0].index("change")
    assert {line[0]: line[change] for line in scores[1:3]} == {"worse": "worse", "base": "d_ff 32"}
    assert {"ln perplexity minus worse", "dev BLEU minus worse"} < {*comparisons[0]}
    assert any(
        note.startswith("minus worse: a row's mean minus") for note in list_footnotes(results)
    )


def test_a_sweep_without_test_scores_cannot_be_reported_on_the_test_set(dev_sweep: Sweep) -> None:
    assert report(dev_sweep.path).results.splits == ("dev",)
    with pytest.raises(UsageError, match="has been scored on the test set"):
        report(dev_sweep.path, split="test")


def test_a_report_that_compares_nothing_with_the_paper_does_not_mention_it(
    dev_sweep: Sweep,
) -> None:
    rows = {name: replace(row, paper=Paper()) for name, row in dev_sweep.rows.items()}
    text = "".join(
        path.read_text()
        for path in write_report(collect(replace(dev_sweep, rows=rows))).iterdir()
        if path.suffix in (".md", ".html")
    )
    notes = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert "newstest2013" not in notes
    assert "the paper reports" not in notes
    assert "as in the paper" not in notes


def test_a_step_has_the_duration_of_the_fastest_run(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs[:-1]:
        now, lines = 0.0, list[str]()
        for number in range(8):
            # Every fourth interval includes an interruption.
            now += (1 + run.seed) * 0.5 + (100 if number % 4 == 3 else 0)
            lines.append(json.dumps({"step": 5 * number, "split": "train", "time": now}))
        # Three reports are too few.
        is_short = run.row == "worse" and run.seed == 0
        (run.path / "metrics.jsonl").write_text("\n".join(lines[: 3 if is_short else None]) + "\n")
    results = collect(dev_sweep)
    head, *rows = read_csv(write_report(results) / "table.csv")
    assert [row[head.index("ms per step")] for row in rows] == ["100.0", "200.0"]
    assert any(note.startswith("ms per step: the lower") for note in list_footnotes(results))


def test_comparisons_name_the_method_of_each_interval(sweep: Sweep) -> None:
    results = collect(sweep)
    worse = results.rows["worse"]
    scores = {"perplexity": {0: 1.0, 1: 9.0, 2: 90.0}}
    few = replace(results.rows["same"], scores={"perplexity": {0: 5.1}})
    rows = {**results.rows, "worse": replace(worse, scores=scores), "same": few}
    head, *lines = list_comparisons(replace(results, rows=rows, split="dev"))
    found = [dict(zip(head, line, strict=True)) for line in lines]
    assert {x["row"]: x["method"] for x in found if x["score"] == "ln perplexity"} == {
        "better": "Dunnett",
        "worse": "Welch, Bonferroni",
        "same": "",
        "other": "Dunnett",
    }


def test_every_format_has_one_line_per_row(folder: Path) -> None:
    rows = read_csv(folder / "table.csv")
    # These runs have no task scores and no tuned field, so the report omits these columns.
    # The files of these runs also contain no brevity penalties and no times.
    omitted = ("test task", "tuned", "test precision", "test brevity", "ms per step")
    shown = [heading for heading in SCORES if heading not in omitted]
    assert rows[0] == shown
    assert [len(row) for row in rows] == [len(shown)] * (len(RESULTS) + 1)
    assert [row[0] for row in rows[1:]] == list(RESULTS)
    latex = (folder / "table.tex").read_text()
    assert latex.count(r" \\") == 3 * (len(RESULTS) + 1)
    assert r"d\_ff 33" in latex
    assert r"4.10 $\pm$ 0.10" in latex
    parts = (folder / "table.md").read_text().split("\n\n")
    written = [part for part in parts if part.startswith("| row |")]
    # The set that the answers use comes before the development set.
    for table, columns in zip(
        written, (shown, COMPARISONS["test"], COMPARISONS["dev"]), strict=True
    ):
        lines = table.splitlines()
        assert len(lines) == len(RESULTS) + 2
        assert all(line.count(" | ") == len(columns) - 1 for line in lines)
    # The report compares each row after the first with the first row, in perplexity and in BLEU.
    lines = read_csv(folder / "comparisons.csv")[1:]
    assert [line[0] for line in lines] == 4 * list(RESULTS)[1:]
    assert all(float(low) <= float(value) <= float(high) for _, _, value, low, high, *_ in lines)


def test_the_table_of_runs_has_unrounded_scores(folder: Path, sweep: Sweep) -> None:
    head, *rows = read_csv(folder / "runs.csv")
    runs = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert len(runs) == 3 * len(RESULTS)
    for run in sweep.runs[:-1]:
        scores = json.loads(next(run.path.glob("evaluations/dev-*/scores.json")).read_text())
        assert float(runs[run.name]["dev_perplexity"]) == scores["perplexity"]
        assert float(runs[run.name]["dev_bleu"]) == scores["bleu"]
    assert runs["base/seed-0"]["command"].startswith("transformer-jax evaluate ")
    assert runs["base/seed-0"]["test_chrf"] == ""
    assert runs["other/seed-2"]["status"] == "failed"


@pytest.mark.parametrize(
    ("precisions", "expected"),
    [
        ([80.5, 60.25, 40.0, 20.0], ["80.5", "60.25", "40.0", "20.0"]),
        ([80.5, "x", None, True], ["80.5", "", "", ""]),
        ([80.5], [""] * 4),
        ("80.5", [""] * 4),
    ],
)
def test_the_table_of_runs_has_the_factors_of_bleu(
    tmp_path: Path, precisions: object, expected: list[str]
) -> None:
    sweep = make_finished_sweep(tmp_path / "s", rows=["base"], splits=["test"])
    [path] = sweep.runs[0].path.glob("evaluations/test-*/scores.json")
    factors = {"brevity_penalty": 0.9875, "precisions": precisions}
    path.write_text(json.dumps(json.loads(path.read_text()) | factors))
    folder = write_report(collect(sweep))
    first, second, *_ = csv.DictReader((folder / "runs.csv").read_text().splitlines())
    assert first["test_brevity_penalty"] == "0.9875"
    assert [first[f"test_precision_{n}"] for n in (1, 2, 3, 4)] == expected
    assert {second["test_brevity_penalty"], second["test_precision_1"]} == {""}
    assert first["command"].startswith("transformer-jax evaluate ")
    # The page contains only the main scores.
    assert Page((folder / "index.html").read_text()).text.count("test_chrf") == 1
    assert "test_brevity_penalty" not in (folder / "index.html").read_text()


def test_the_command_of_a_run_evaluates_the_set_that_was_scored(dev_sweep: Sweep) -> None:
    head, *rows = make_run_table(collect(dev_sweep))
    assert {row[head.index("command")].endswith(" --split dev") for row in rows} == {True}


def test_a_report_does_not_keep_the_tables_of_an_earlier_report(dev_sweep: Sweep) -> None:
    folder = write_report(collect(dev_sweep))
    for name in ("tuning.csv", "factors.csv"):
        (folder / name).write_text("row\n")
    (folder / "notes.txt").write_text("mine")
    write_report(collect(dev_sweep))
    assert not {"tuning.csv", "factors.csv"} & {path.name for path in folder.iterdir()}
    assert (folder / "notes.txt").exists()


def test_differences_have_intervals_signs_and_p_values(sweep: Sweep) -> None:
    head, *rows = make_table(collect(sweep), COMPARISONS["test"])
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    number = r"[+-]\d+\.\d+"
    interval = rf"\[{number}, {number}\]"
    better = cells["better"]
    assert re.fullmatch(rf"-0\.\d+ {interval}", better["ln perplexity minus base"])
    assert re.fullmatch(interval, better["Welch"])
    assert better["paper"] == "-0.054"
    assert better["verdict"] == "as in the paper"
    assert better["test BLEU minus base"].startswith("+6.00 [")
    signed = better["test BLEU minus base by seed"].split(", ")
    assert len(signed) == 3
    assert all(re.fullmatch(r"\+\d+\.\d\d \((< 0\.001|0\.\d{3})\)", x) for x in signed)
    assert signed[0].endswith("(< 0.001)")
    # The sign of a row's difference may vary from seed to seed.
    assert re.fullmatch(r"\+.*, -.*, -.*", cells["worse"]["test BLEU minus base by seed"])


def test_the_same_runs_give_the_same_files(sweep: Sweep, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(collect(sweep))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_runs_that_failed_to_train_have_readable_scores(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        if run.row == "base":
            for path in run.path.glob("evaluations/dev-*/scores.json"):
                path.write_text(
                    json.dumps({**json.loads(path.read_text()), "perplexity": math.inf})
                )
            report = {"split": "dev", "step": 2, "perplexity": math.inf}
            (run.path / "metrics.jsonl").write_text(f"{json.dumps(report)}\n")
    worse = dev_sweep.find("worse/seed-0").path / "metrics.jsonl"
    worse.write_text(json.dumps({"split": "dev", "step": 2, "perplexity": math.exp(700)}))
    results = collect(dev_sweep)
    folder = write_report(results)
    assert "perplexity" not in results.rows["base"].scores
    assert results.compare("worse", "perplexity").difference is None
    text = (folder / "table.md").read_text()
    # One note lists all runs.
    assert text.count("Failed to train") == 1
    assert "base/seed-0 (inf), base/seed-1 (inf), base/seed-2 (inf)." in text


@pytest.mark.parametrize("value", ["8", None, [8], {"a": 8}, True])
def test_values_of_unexpected_types_in_files_are_ignored(dev_sweep: Sweep, value: object) -> None:
    run = dev_sweep.find("base/seed-0")
    table = (write_report(collect(dev_sweep)) / "table.md").read_text()
    reports = [
        {"step": 9, "split": "dev", "perplexity": value},
        {"step": 9, "split": "train", "flops": value, "utilization": 0.1},
        {"step": 9, "split": "train", "flops": 1e9, "utilization": value},
    ]
    with (run.path / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(report)}\n" for report in reports)
    [path] = run.path.glob("evaluations/dev-*/scores.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "chrf": value}))
    folder = write_report(collect(dev_sweep))
    assert (folder / "table.md").read_text() == table
    path.write_text(json.dumps({**json.loads(path.read_text()), "bleu": value}))
    assert read_csv(write_report(collect(dev_sweep)) / "runs.csv")[1][4] == ""


def test_the_command_prints_the_table_and_its_folder(
    dev_sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(dev_sweep.path)]) == 0
    out = capsys.readouterr().out
    assert "worse" in out
    assert f"written to {dev_sweep.path / 'report'}" in out
    assert f"Reported by: transformer-jax report {dev_sweep.path}" in out
    # The report omits columns that have no values, such as test BLEU.
    assert "compound-split" not in read_csv(dev_sweep.path / "report" / "table.csv")[0]


def test_the_score_of_a_task_has_a_column_and_a_note(tmp_path: Path) -> None:
    sweep = make_finished_sweep(tmp_path / "s", rows=["base"])
    for run in sweep.runs:
        for path in run.path.glob("evaluations/test-*/scores.json"):
            task = {"name": "parsing", "main_score": "f1", "f1": 80.0 + run.seed}
            path.write_text(json.dumps({**json.loads(path.read_text()), "task": task}))
    results = collect(sweep)
    table = make_table(results, SCORES)
    assert table[0][-1] == "test task"
    assert table[1][-1] == "81.0 ± 1.0"
    assert any(note.startswith("test task: the main score") for note in list_footnotes(results))
