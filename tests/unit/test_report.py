"""Test that a report has the same results and footnotes in every format."""

import csv
import json
from pathlib import Path

import pytest
from finished_runs import HOSTILE, RESULTS, collect, make_finished_sweep, set_status
from test_tables import Page

from transformer_jax.cli import main
from transformer_jax.sweeps.plan import Sweep, plan_sweep
from transformer_jax.sweeps.report import COLUMNS, footnotes, write_report


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep in which one run failed and the other runs are done. Tests must not change it."""
    sweep = make_finished_sweep(tmp_path_factory.mktemp("report") / "s")
    set_status(sweep.runs[-1], "failed", phase="train", note=HOSTILE)
    return sweep


@pytest.fixture(scope="module")
def folder(sweep: Sweep) -> Path:
    """The folder that contains the report of the sweep."""
    return write_report(collect(sweep))


@pytest.fixture
def dev_sweep(tmp_path: Path) -> Sweep:
    """A sweep that a test may change. It has no test scores, which avoids the bootstrap."""
    return make_finished_sweep(tmp_path / "s", rows=["base", "worse"], splits=["dev"])


def read_csv(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


def test_names_and_reasons_are_plain_text_in_every_format(folder: Path) -> None:
    files = [(folder / name).read_text() for name in ("index.html", "table.tex", "table.md")]
    page = Page(files[0])
    assert HOSTILE in page.text
    assert "b" not in page.tags
    assert "script" not in page.tags
    assert not any(HOSTILE in text for text in files)
    assert "<b>" not in "".join(files)


def test_the_page_links_each_row_to_its_first_run_and_each_run_to_itself(
    folder: Path, sweep: Sweep
) -> None:
    links = Page((folder / "index.html").read_text()).links
    assert len(links) == len(RESULTS) + 3 * len(RESULTS)
    assert all((folder / link).resolve().is_relative_to(sweep.path) for link in links)
    assert "../better/seed-2" in links
    assert (folder / "../better/seed-2").exists()


def test_every_format_has_one_line_per_row(folder: Path) -> None:
    rows = read_csv(folder / "table.csv")
    assert [len(row) for row in rows] == [len(COLUMNS)] * (len(RESULTS) + 1)
    assert [row[0] for row in rows[1:]] == list(RESULTS)
    latex = (folder / "table.tex").read_text()
    assert latex.count(r" \\") == len(RESULTS) + 1
    assert r"d\_ff 33" in latex
    assert r"4.10 $\pm$ 0.10" in latex
    markdown = (folder / "table.md").read_text().splitlines()
    lines = markdown[: len(RESULTS) + 2]
    assert all(line.count(" | ") == len(COLUMNS) - 1 for line in lines)


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


def test_footnotes_count_agreement_with_the_paper_and_name_missing_runs(folder: Path) -> None:
    text = (folder / "table.md").read_text()
    assert "in 1 of 1 rows with a significant difference, and in 1 of 2 rows without" in text
    assert text.count("Missing: ") == 1
    assert "Missing: other/seed-2: failed, train:" in text


def test_the_same_runs_give_the_same_files(sweep: Sweep, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(collect(sweep))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_report_of_single_seeds_says_that_they_prove_nothing(dev_sweep: Sweep) -> None:
    single = plan_sweep(dev_sweep.path, dev_sweep.rows, 1)
    notes = " ".join(footnotes(collect(single)))
    assert "Every row has only one seed, so a difference between rows proves nothing." in notes
    for seed in (1, 2):
        set_status(dev_sweep.find(f"worse/seed-{seed}"), "failed")
    notes = " ".join(footnotes(collect(dev_sweep)))
    assert "Rows with only one seed prove nothing alone: worse." in notes


def test_a_report_names_rows_with_another_vocabulary(dev_sweep: Sweep) -> None:
    for run in dev_sweep.runs:
        data = {"data": {"fingerprint": "b" if run.row == "worse" else "a"}}
        (run.path / "run.json").write_text(json.dumps(data))
    notes = " ".join(footnotes(collect(dev_sweep)))
    assert "Rows whose text or vocabulary differs from that of base: worse." in notes


def test_the_command_prints_the_table_and_its_folder(
    dev_sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(dev_sweep.path)]) == 0
    out = capsys.readouterr().out
    assert "worse" in out
    assert f"written to {dev_sweep.path / 'report'}" in out
    assert f"Command: transformer-jax report {dev_sweep.path}" in out
    # The report omits columns without values, such as test BLEU.
    assert "compound-split" not in read_csv(dev_sweep.path / "report" / "table.csv")[0]
