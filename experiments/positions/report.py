"""The study as a figure and as a table."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from experiments.positions.study import Score, Study
from transformer_jax.sweeps.results import SeedStatistics

NAMES: dict[Score, str] = {
    "perplexity": "perplexity per piece",
    "exact": "lines exactly right, %",
    "bleu": "BLEU",
}
DIGITS: dict[Score, int] = {"perplexity": 2, "exact": 1, "bleu": 1}
# Okabe and Ito's colours, which the colour-blind can tell apart; grey for their yellow, which is
# too light for a line on white.
COLOURS = (
    *("#000000", "#D55E00", "#E69F00", "#0072B2"),
    *("#009E73", "#CC79A7", "#56B4E9", "#888888"),
)
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")


def figure(study: Study) -> Figure:
    """Draw both scores by length: a line for each row, its bars one standard deviation over seeds.

    A point stands in the middle of its bucket, whose sentences are counted above; the broken
    vertical line is L.
    """
    drawing = Figure(figsize=(11, 4.8), layout="constrained")
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for axes, name in zip(drawing.subplots(1, 2), names, strict=True):
        for number, (row, scores) in enumerate(study.scores.items()):
            found = [bucket[name] for bucket in scores]
            # Side by side, so that bars do not hide one another.
            shift = (number / max(1, len(study.scores) - 1) - 0.5) * study.limit / 8
            axes.errorbar(
                [(bucket.above + bucket.end) / 2 + shift for bucket in study.buckets],
                [spread.mean for spread in found],
                [spread.deviation or 0.0 for spread in found],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)],
                linewidth=1.4,
                markersize=5,
                capsize=2,
                label=row.replace("$", r"\$"),
            )
        axes.axvline(study.limit, color="black", linestyle=(0, (6, 3)), linewidth=1)
        axes.annotate(
            f"L = {study.limit}",
            (study.limit, 1),
            (3, -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
        )
        for number, bucket in enumerate(study.buckets):
            axes.text(
                (bucket.above + bucket.end) / 2,
                1.01,
                f"{'' if number else 'n = '}{len(bucket.places)}",
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize="small",
            )
        ends = sorted({edge for b in study.buckets for edge in (b.above, b.end)})
        axes.set_xticks(ends, [f"{end:g}" for end in ends])
        axes.set(xlabel="pieces of the longer side (edges of buckets)", ylabel=NAMES[name])
        axes.grid(alpha=0.3)
    left, right = drawing.axes
    left.set_yscale("log")
    left.yaxis.set_major_formatter(LogFormatter())
    left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    right.set_ylim(bottom=min(0.0, right.get_ylim()[0]))
    handles, labels = left.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside right center", title="positions")
    return drawing


def drawn(study: Study, form: str) -> bytes:
    """Return the figure as a file of this form, svg or png: of the same runs the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "none"}):
        out = io.BytesIO()
        # Neither when it was drawn nor by which version.
        metadata: dict[str, Any] = {"svg": {"Date": None}, "png": {"Software": None}}[form]
        figure(study).savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()


def _cell(spread: SeedStatistics, digits: int) -> str:
    if spread.deviation is None:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def markdown(study: Study) -> str:
    """Return a table for each score: rows by bucket, mean and standard deviation over seeds."""
    parts: list[str] = []
    head = [f"{bucket.name}, {len(bucket.places)} sentences" for bucket in study.buckets]
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for name in names:
        rows = [
            [row, *(_cell(bucket[name], DIGITS[name]) for bucket in study.scores[row])]
            if row in study.scores
            else [row, *("-" for _ in study.buckets)]
            for row in study.sweep.rows
        ]
        table = [[NAMES[name], *head], ["---"] * (len(head) + 1), *rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    parts.append("\n".join(f"- {remark}" for remark in remarks(study)))
    return "\n\n".join(parts) + "\n"


def remarks(study: Study) -> Sequence[str]:
    """Return what a reader must know to read the table, and what is missing in it."""
    told = [
        f"Trained on sentences of at most L = {study.limit} pieces, ends counted. A bucket has the "
        "sentences whose longer side, source or target, has so many.",
        "Perplexity is per piece of the reference, without label smoothing; ± is the standard "
        f"deviation over random seeds ({', '.join(map(str, study.sweep.seeds))}).",
    ]
    if study.metric == "bleu":
        told.append(
            f"BLEU is of each bucket by itself, {study.signature}: of two buckets the sentences "
            "differ, so rows can be compared, and columns only with care."
        )
    return [*told, *(f"Missing: {why}" for why in study.missing)]


def comma_separated(study: Study) -> str:
    """Return a line for each row, bucket, score and seed's value."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["row", "above", "end", "sentences", "score", "run", "value"])
    for row, scores in study.scores.items():
        for bucket, found in zip(study.buckets, scores, strict=True):
            edges = f"{bucket.above:g}", f"{bucket.end:g}", len(bucket.places)
            for name, spread in found.items():
                for run, value in enumerate(spread.values):
                    table.writerow([row, *edges, name, run, f"{value:.6g}"])
    return out.getvalue()
