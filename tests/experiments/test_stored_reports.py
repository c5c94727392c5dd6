"""Test that the differences in stored reports follow from the scores of their runs."""

import csv
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from transformer_jax.reports.seed_statistics import analyze, welch_interval

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
FOLDERS = [x.parent for x in sorted(RESULTS.glob("**/comparisons.csv"))]
# The report excludes this run, whose perplexity is higher than a unigram model's.
FAILED = ["lion/seed-0"]
Scores = dict[str, dict[int, float]]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_scores(folder: Path, score: str, split: str) -> Scores:
    """Return the scores of all runs that trained, by row and seed."""
    scores: Scores = defaultdict(dict)
    column = "perplexity" if score == "ln perplexity" else "bleu"
    for run in read(folder / "runs.csv"):
        row, seed = run["run"].removeprefix("sweeps/").split("/seed-")
        if (text := run[f"{split}_{column}"]) and run["run"] not in FAILED:
            value = float(text)
            scores[row][int(seed)] = math.log(value) if column == "perplexity" else value
    return scores


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: str(x.relative_to(RESULTS)))
def test_stored_differences_follow_from_the_scores(folder: Path) -> None:
    lines = read(folder / "comparisons.csv")
    assert lines
    for line in lines:
        scores = read_scores(folder, line["score"], line["split"])
        others = {row: x for row, x in scores.items() if row != "control"}
        base, row = next(iter(scores)), line["row"]
        if not scores[row]:
            assert not line["difference"]
            continue
        ours, theirs = (list(scores[x].values()) for x in (row, base))
        found = analyze(others).comparisons.get(row)
        interval = found.interval if found else welch_interval(ours, theirs)
        difference = found.difference if found else np.mean(ours) - np.mean(theirs)
        expected = [difference, *(interval or ()), *(welch_interval(ours, theirs) or ())]
        names = "difference", "low", "high", "welch_low", "welch_high"
        stored = [float(line[name]) for name in names if line[name]]
        assert stored == pytest.approx(expected, rel=1e-6, abs=1e-9), line


def test_the_tuned_table_fits_the_model_of_the_intervals_as_the_page_says() -> None:
    page = (RESULTS.parents[1] / "docs" / "statistics.md").read_text("utf-8")
    found = {}
    for score, label in (("ln perplexity", "log perplexity"), ("BLEU", "BLEU")):
        scores = read_scores(RESULTS / "table3-multi30k-tuned", score, "test")
        # C3 is a high-variance row, and the control has other seeds.
        rows = [x for row, x in scores.items() if row not in ("C3", "control")]
        table = np.array([[x[seed] for seed in range(5)] for x in rows])
        row_effects = table.mean(axis=1, keepdims=True) - table.mean()
        seed_effects = table.mean(axis=0) - table.mean()
        residuals = table - table.mean() - row_effects - seed_effects
        freedom = (len(rows) - 1) * 4
        total = (residuals**2).sum()
        seeds = len(rows) * (seed_effects**2).sum() / 4 / (total / freedom)
        products = row_effects * seed_effects
        product = (products * table).sum() ** 2 / (products**2).sum()
        tukey = product / ((total - product) / (freedom - 1))
        found[label] = [
            stats.f.sf(seeds, 4, freedom),
            stats.f.sf(tukey, 1, freedom - 1),
            stats.levene(*table).pvalue,
            stats.shapiro(residuals.ravel()).pvalue,
        ]
    for label, values in found.items():
        assert f"| {label} | {' | '.join(f'{p:.3f}' for p in values)} |" in page, (label, values)
