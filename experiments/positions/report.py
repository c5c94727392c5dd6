"""Render the scores of the study as a figure and as tables."""

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from experiments.positions.study import Score, Study
from transformer_jax.sweeps.results import SeedStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS: dict[Score, str] = {
    "perplexity": "perplexity per token",
    "exact": "lines exactly right, %",
    "bleu": "BLEU",
}
DIGITS: dict[Score, int] = {"perplexity": 2, "exact": 1, "bleu": 1}
# These are the colors of Okabe and Ito, which color-blind readers can distinguish. Grey replaces
# their yellow, because a yellow line is hard to see on white.
COLORS = (
    *("#000000", "#D55E00", "#E69F00", "#0072B2"),
    *("#009E73", "#CC79A7", "#56B4E9", "#888888"),
)
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")


def draw_figure(study: Study) -> Figure:
    """Plot perplexity and the other score by length, one curve for each scheme.

    Error bars show one standard deviation over seeds. Each point is in the middle of its bucket,
    and the number of sentences is above it. The dashed vertical line marks L.
    """
    drawing = Figure(figsize=(11, 4.8), layout="constrained")
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for axes, name in zip(drawing.subplots(1, 2), names, strict=True):
        _plot_curves(axes, study, name)
        _label_buckets(axes, study)
        axes.set(xlabel="tokens of the longer side (edges of buckets)", ylabel=LABELS[name])
        axes.grid(alpha=0.3)
    left, right = drawing.axes
    left.set_yscale("log")
    left.yaxis.set_major_formatter(LogFormatter())
    left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    right.set_ylim(bottom=min(0.0, right.get_ylim()[0]))
    handles, labels = left.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside right center", title="positions")
    return drawing


def _plot_curves(axes: "Axes", study: Study, name: Score) -> None:
    for number, (scheme, curve) in enumerate(study.curves.items()):
        # Shift the curves sideways, so that their error bars do not overlap.
        shift = number / max(1, len(study.curves) - 1) - 0.5
        shift *= study.max_training_length / 8
        statistics = [scores[name] for scores in curve]
        axes.errorbar(
            [(bucket.above + bucket.end) / 2 + shift for bucket in study.buckets],
            [x.mean for x in statistics],
            [x.deviation or 0.0 for x in statistics],
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.4,
            markersize=5,
            capsize=2,
            label=scheme.replace("$", r"\$"),
        )


def _label_buckets(axes: "Axes", study: Study) -> None:
    limit = study.max_training_length
    axes.axvline(limit, color="black", linestyle=(0, (6, 3)), linewidth=1)
    axes.annotate(
        f"L = {limit}",
        (limit, 1),
        (3, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
    )
    for number, bucket in enumerate(study.buckets):
        axes.text(
            (bucket.above + bucket.end) / 2,
            1.01,
            f"{'' if number else 'n = '}{len(bucket.indices)}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize="small",
        )
    edges = sorted({edge for bucket in study.buckets for edge in (bucket.above, bucket.end)})
    axes.set_xticks(edges, [f"{edge:g}" for edge in edges])


def render_figure(study: Study, form: str) -> bytes:
    """Return the figure as an SVG or PNG file. Equal scores give equal bytes."""
    with mpl.rc_context({"svg.hashsalt": "transformer_jax", "svg.fonttype": "none"}):
        out = io.BytesIO()
        # Omit the date and the version of Matplotlib, so that equal figures are equal files.
        metadata: dict[str, None] = {"Date" if form == "svg" else "Software": None}
        draw_figure(study).savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()


def _format_cell(statistics: SeedStatistics, digits: int) -> str:
    if statistics.deviation is None:
        return f"{statistics.mean:.{digits}f}"
    return f"{statistics.mean:.{digits}f} ± {statistics.deviation:.{digits}f}"


def to_markdown(study: Study) -> str:
    """Return a table of schemes by buckets for each score, with footnotes."""
    sections: list[str] = []
    columns = [f"{bucket.name}, {len(bucket.indices)} sentences" for bucket in study.buckets]
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for name in names:
        rows = [
            [scheme, *(_format_cell(scores[name], DIGITS[name]) for scores in study.curves[scheme])]
            if scheme in study.curves
            else [scheme, *("-" for _ in study.buckets)]
            for scheme in study.sweep.rows
        ]
        table = [[LABELS[name], *columns], ["---"] * (len(columns) + 1), *rows]
        sections.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    sections.append("\n".join(f"- {footnote}" for footnote in footnotes(study)))
    return "\n\n".join(sections) + "\n"


def footnotes(study: Study) -> Sequence[str]:
    """Return notes that explain the tables and list missing scores."""
    notes = [
        f"Training sentences have at most L = {study.max_training_length} tokens, including EOS. "
        "The length of a sentence is that of its source or target, the longer of the two.",
        "Perplexity is per token of the reference, without label smoothing; ± is the standard "
        f"deviation over random seeds ({', '.join(map(str, study.sweep.seeds))}).",
    ]
    if study.metric == "bleu":
        notes.append(
            f"BLEU is computed for each bucket separately ({study.bleu_signature}). Buckets "
            "contain different sentences, so compare rows rather than columns."
        )
    return [*notes, *(f"Missing: {description}" for description in study.missing)]


def to_csv(study: Study) -> str:
    """Return a line for each scheme, bucket, score, and seed."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["row", "above", "end", "sentences", "score", "run", "value"])
    for scheme, curve in study.curves.items():
        for bucket, scores in zip(study.buckets, curve, strict=True):
            columns = f"{bucket.above:g}", f"{bucket.end:g}", len(bucket.indices)
            for name, statistics in scores.items():
                for run, value in enumerate(statistics.values):
                    table.writerow([scheme, *columns, name, run, f"{value:.6g}"])
    return out.getvalue()
