"""Compare a report's rows with its first row, on the development set and on the test set.

    python -m experiments.dev_and_test experiments/results/table3-multi30k

The command applies a report's analysis to the scores in its `runs.csv`. The paper's differences
come from `comparisons.csv`. The command also compares each row with the first row without using the
other rows: a paired t test uses the differences between runs with the same seed, and Welch's test
ignores the pairing. Neither p-value is corrected for the number of rows. The result is printed as
Markdown.
"""

import csv
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from scipy import stats
from tyro.conf import Positional

from transformer_jax.commands.arguments import parse_program
from transformer_jax.config.rows import CONTROL
from transformer_jax.console import run_and_report, stdout
from transformer_jax.data.splits import Split
from transformer_jax.errors import storage_errors
from transformer_jax.reports.results import MARGINS, PaperScore
from transformer_jax.reports.seed_statistics import Interval, analyze, format_p, verdict
from transformer_jax.reports.tables import MISSING, Table, to_markdown

LABELS: dict[PaperScore, str] = {"perplexity": "ln perplexity", "bleu": "BLEU"}
FORMATS: dict[PaperScore, str] = {"perplexity": "+.3f", "bleu": "+.2f"}


def read_scores(folder: Path, split: Split, score: PaperScore) -> dict[str, dict[int, float]]:
    """Return each finished run's scores (perplexity as a logarithm), keyed by row and seed.

    The scores of a negative control are omitted.
    """
    scores: dict[str, dict[int, float]] = {}
    with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            if run["status"] == "done" and (cell := run[f"{split}_{score}"]):
                row, seed = run["run"].split("/seed-")
                value = math.log(float(cell)) if score == "perplexity" else float(cell)
                scores.setdefault(row, {})[int(seed)] = value
    scores.pop(CONTROL, None)
    return scores


def read_paper(folder: Path, score: PaperScore) -> dict[str, float]:
    """Return each row's difference from the first row in the paper, if it is known."""
    with (folder / "comparisons.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    known = (x for x in lines if x["score"] == LABELS[score] and x["paper"])
    return {x["row"]: float(x["paper"]) for x in known}


def compare_rows(folder: Path, split: Split, score: PaperScore) -> Table:
    """Return a table of all rows' differences from the first row."""
    headings = ["row", "difference", "simultaneous interval", "Welch", "paper", "verdict"]
    table = [[*headings, "paired difference", "p, paired", "p, Welch"]]
    scores, spec = read_scores(folder, split, score), FORMATS[score]
    paper = read_paper(folder, score)
    analysis = analyze(scores)
    for row, comparison in analysis.comparisons.items():
        if comparison.difference is None:
            continue
        mean, interval, p = compare_pairs(scores[row], scores[analysis.base])
        unpaired = [list(scores[name].values()) for name in (row, analysis.base)]
        cells = [
            row,
            f"{comparison.difference:{spec}}",
            format_interval(comparison.interval, spec),
            format_interval(comparison.welch, spec),
            f"{paper[row]:{spec}}" if row in paper else MISSING,
            verdict(comparison.interval, paper[row], MARGINS[score]) if row in paper else MISSING,
            f"{mean:{spec}} {format_interval(interval, spec)}",
            format_p(p),
            format_p(float(stats.ttest_ind(*unpaired, equal_var=False).pvalue)),
        ]
        table.append(cells)
    return table


def compare_pairs(
    row: Mapping[int, float], base: Mapping[int, float]
) -> tuple[float, Interval, float]:
    """Return a paired t test's mean difference, its 95% interval, and its p-value."""
    test = stats.ttest_1samp([row[seed] - base[seed] for seed in row if seed in base], 0.0)
    low, high = test.confidence_interval(0.95)
    mean = statistics.fmean(row[seed] - base[seed] for seed in row if seed in base)
    return mean, Interval(float(low), float(high)), float(test.pvalue)


def format_interval(interval: Interval | None, spec: str) -> str:
    """Format an interval as in the documentation."""
    return MISSING if interval is None else f"[{interval.low:{spec}} {interval.high:{spec}}]"


def describe(folder: Path) -> Iterator[str]:
    """Yield the parts of the Markdown output."""
    yield "# Development set and test set"
    for score in get_args(PaperScore):
        for split in ("dev", "test"):
            yield f"## {LABELS[score]} on the {split} set"
            yield to_markdown(compare_rows(folder, split, score), align=True)


def write(folder: Positional[Path]) -> None:
    """Print the comparisons in a report's folder as Markdown."""
    with storage_errors(f"{folder} cannot be read as a report"):
        stdout.print("\n\n".join(describe(folder)))


if __name__ == "__main__":
    prog = "python -m experiments.dev_and_test"
    sys.exit(run_and_report(lambda: parse_program(prog, write)))
