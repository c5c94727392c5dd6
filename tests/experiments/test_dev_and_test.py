"""Test the comparison of Table 3's rows on the development set and the test set."""

import csv
import math
from pathlib import Path

import pytest
from pages import ROOT

from experiments.dev_and_test import compare_pairs, describe, read_scores, write
from transformer_jax.errors import StorageError

RESULTS = ROOT / "experiments/results"


@pytest.mark.parametrize("study", ["table3-multi30k", "learned-or-sinusoidal"])
def test_the_stored_page_contains_the_analysis_of_the_stored_runs(study: str) -> None:
    page = "\n\n".join(describe(RESULTS / study)) + "\n"
    assert page == (RESULTS / study / "dev-and-test.md").read_text("utf-8")


def test_a_paired_test_ignores_what_two_rows_share() -> None:
    # The differences are 1, 2, and 3, so the mean is 2, the standard error is 1 / sqrt(3), and t is
    # 3.46 with two degrees of freedom. With two degrees of freedom, |t| is below x with probability
    # x / sqrt(2 + x^2).
    row, base = {0: 101.0, 1: 12.0, 2: 3.0, 3: 7.0}, {0: 100.0, 1: 10.0, 2: 0.0}
    mean, interval, p = compare_pairs(row, base)
    assert mean == 2
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert interval == pytest.approx([2 - half, 2 + half])
    assert p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))


def test_only_finished_runs_count(tmp_path: Path) -> None:
    with (tmp_path / "runs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "status", "dev_perplexity", "test_bleu"])
        writer.writerow(["base/seed-0", "done", math.e, 30.5])
        writer.writerow(["E/seed-3", "queued", "", ""])
        writer.writerow(["control/seed-20000", "done", math.e, 30.5])
    assert read_scores(tmp_path, "dev", "perplexity") == {"base": {0: pytest.approx(1)}}
    assert read_scores(tmp_path, "test", "bleu") == {"base": {0: 30.5}}


def test_rows_without_scores_in_the_paper_have_no_verdict() -> None:
    page = "".join(describe(RESULTS / "since2017"))
    [line] = [x for x in page.split("## BLEU on the dev")[0].splitlines() if "alibi" in x][:1]
    assert [cell.strip() for cell in line.split("|")[5:7]] == ["-", "-"]


def test_a_folder_that_is_not_a_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"^{tmp_path} cannot be read as a report: "):
        write(tmp_path)
