"""Render the study's scores as a figure and tables."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from experiments.positions.study import Score, Study
from transformer_jax.reports.results import MARGINS
from transformer_jax.reports.seed_statistics import (
    CONFIDENCE,
    HIGH_VARIANCE_RATIO,
    Analysis,
    analyze,
    format_mean,
    welch_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS: dict[Score, str] = {
    "perplexity": "perplexity per token",
    "exact": "lines exactly right, %",
    "bleu": "BLEU",
}
DIGITS: dict[Score, int] = {"perplexity": 2, "exact": 1, "bleu": 1}
# Okabe and Ito's color-blind-safe palette. Gray replaces yellow, which is hard to see on white.
# Wine and olive come from Paul Tol's palette.
COLORS = (
    *("#000000", "#D55E00", "#E69F00", "#0072B2", "#009E73"),
    *("#CC79A7", "#56B4E9", "#888888", "#882255", "#999933", "#BBBBBB"),
)
MARKERS = "osD^vPX*phH"
DASHES = ("-", "--", "-.", ":")


def draw_figure(study: Study) -> Figure:
    """Plot perplexity and either BLEU or exact matches by length, with one curve per scheme.

    Each point is the mean over seeds, and its error bar shows one standard deviation. For
    perplexity, the mean and the standard deviation are computed from logarithms. Each point is near
    the middle of its bucket. The number of sentences in each bucket appears at the top. A bucket's
    gray band contains all means that do not differ significantly from the first scheme's mean. The
    dashed vertical line marks L, unless it is beyond the last bucket.
    """
    drawing = Figure(figsize=(11, 4.8), layout="constrained")
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for axes, name in zip(drawing.subplots(1, 2), names, strict=True):
        _plot_bands(axes, study, name)
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
    drawing.legend(handles, labels, loc="outside right center", title="row")
    return drawing


def _plot_curves(axes: "Axes", study: Study, name: Score) -> None:
    for number, (scheme, curve) in enumerate(study.curves.items()):
        # Shift the curves horizontally, so that their error bars do not overlap.
        shift = number / max(1, len(study.curves) - 1) - 0.5
        shift *= min(bucket.end - bucket.above for bucket in study.buckets) / 4
        low, center, high = np.array([_error_bar(by_name[name], name) for by_name in curve]).T
        axes.errorbar(
            [(bucket.above + bucket.end) / 2 + shift for bucket in study.buckets],
            center,
            [center - low, high - center],
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.4,
            markersize=5,
            capsize=2,
            label=scheme.replace("$", r"\$"),
        )


def _error_bar(values: Sequence[float], name: Score) -> Float[np.ndarray, " 3"]:
    """Return the lower end, the mean, and the upper end of an error bar."""
    if name == "perplexity":
        values = [math.log(value) for value in values]
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    bar = np.array([mean - deviation, mean, mean + deviation])
    return np.exp(bar) if name == "perplexity" else bar


def _plot_bands(axes: "Axes", study: Study, name: Score) -> None:
    label = f"no significant\ndifference from\n{study.schemes[0]}"
    for bucket, band in zip(study.buckets, significance_bands(study, name), strict=True):
        if band is not None:
            x = (bucket.above, bucket.end)
            # Scores are never negative.
            axes.fill_between(
                x, max(0.0, band[0]), band[1], color="black", alpha=0.12, linewidth=0, label=label
            )
            # A label that starts with "_" is omitted from the legend, which needs only one entry.
            label = "_"


def analyze_bucket(study: Study, number: int, name: Score) -> Analysis:
    """Compare all schemes in a bucket with the first scheme, as docs/statistics.md specifies.

    All buckets form one family. By Bonferroni's inequality, the probability of any false difference
    in the family is at most 5%. A control has other seeds, so this analysis excludes it.
    """
    scores = {
        scheme: dict(zip(study.seeds[scheme], _values(study, scheme, number, name), strict=True))
        for scheme in study.curves
        if scheme not in study.controls
    }
    confidence = 1 - (1 - CONFIDENCE) / len(study.buckets)
    return analyze({study.schemes[0]: {}, **scores}, confidence)


def _values(study: Study, scheme: str, number: int, name: Score) -> list[float]:
    """Return a scheme's scores in a bucket, as logarithms if they are perplexities."""
    values = study.curves[scheme][number][name]
    return [math.log(x) for x in values] if name == "perplexity" else list(values)


def significance_bands(study: Study, name: Score) -> list[tuple[float, float] | None]:
    """For each bucket, return the range of means that do not differ significantly from the first.

    By Dunnett's test, a scheme whose mean is outside this range differs significantly from the
    first scheme. The range does not apply to a scheme whose seeds differ from those of the first
    scheme, or whose scores vary much more between seeds than those of the other schemes. The
    probability of any false claim in all buckets together is at most 5%. The range is None if no
    other scheme has the same seeds as the first, if there are fewer than two seeds, if scores do
    not vary, or if the first scheme's scores vary much more between seeds than those of the others.
    """
    first = study.schemes[0]
    same_seeds = {x for x in study.schemes if set(study.seeds[x]) == set(study.seeds[first])}
    bands: list[tuple[float, float] | None] = []
    for number in range(len(study.buckets)):
        comparisons = analyze_bucket(study, number, name).comparisons
        pooled = (x for scheme, x in comparisons.items() if scheme in same_seeds)
        intervals = [x.interval for x in pooled if x.interval and x.p is not None]
        half = max(((x.high - x.low) / 2 for x in intervals), default=0.0)
        if not half:
            bands.append(None)
            continue
        center = statistics.fmean(_values(study, first, number, name))
        band = (center - half, center + half)
        bands.append((math.exp(band[0]), math.exp(band[1])) if name == "perplexity" else band)
    return bands


def _describe_exceptions(study: Study) -> list[str]:
    """Return notes about any schemes and buckets to which the significance bands do not apply."""
    names: tuple[Score, ...] = ("perplexity", study.metric)
    high_variance = [
        f"{scheme} in {bucket.name} ({LABELS[name].split(',')[0]})"
        for name in names
        for number, bucket in enumerate(study.buckets)
        for scheme in analyze_bucket(study, number, name).high_variance
    ]
    seeds = set(study.seeds[study.schemes[0]])
    incomplete = [
        scheme
        for scheme in study.curves
        if scheme not in study.controls and set(study.seeds[scheme]) != seeds
    ]
    notes = []
    if high_variance:
        notes.append(
            "The gray bands do not apply to these rows, whose standard deviations are more than "
            f"{HIGH_VARIANCE_RATIO:g} times the typical one: {', '.join(high_variance)}. These "
            "rows are compared by Welch's method with a Bonferroni correction."
        )
    if incomplete:
        notes.append(
            "The gray bands do not apply to these rows, which have other seeds than "
            f"{study.schemes[0]}: {', '.join(incomplete)}."
        )
    return notes


def _describe_control(study: Study, control: str, copied: str) -> str:
    """Return a note that states in how many buckets a control seems to differ.

    A control is compared by Welch's method, because its seeds are not those of the copied scheme.
    """
    names: tuple[Score, ...] = ("perplexity", study.metric)
    parts = []
    for name in names:
        found = 0
        for number in range(len(study.buckets)):
            ours, theirs = (_values(study, x, number, name) for x in (control, copied))
            interval = welch_interval(ours, theirs, 1 - (1 - CONFIDENCE) / len(study.buckets))
            found += interval is not None and interval.excludes_zero
        parts.append(f"{found} of {len(study.buckets)} ({LABELS[name].split(',')[0]})")
    return (
        f"{control} is a copy of {copied} with other seeds. By Welch's method with Bonferroni's "
        f"correction, it seems to differ in {' and '.join(parts)} buckets."
    )


def _label_buckets(axes: "Axes", study: Study) -> None:
    limit = study.max_training_length
    if study.reaches_limit:
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
    axes.set_xlim(edges[0], edges[-1])


def to_markdown(study: Study, provenance: str = "") -> str:
    """Return scheme-by-bucket tables of each score and its differences, with footnotes.

    `provenance` is a Markdown list of additional footnotes about the runs.
    """
    sections: list[str] = []
    columns = [f"{bucket.name}, {len(bucket.indices)} sentences" for bucket in study.buckets]
    names: tuple[Score, ...] = ("perplexity", study.metric)
    for name in names:
        rows = [
            [scheme, *(_format_cell(study, scheme, number, name) for number in range(len(columns)))]
            for scheme in study.schemes
        ]
        sections.append(_format_table([LABELS[name], *columns], rows))
    for name in names:
        rows = [
            [scheme, *(_format_difference(study, scheme, x, name) for x in range(len(columns)))]
            for scheme in study.schemes[1:]
            if scheme not in study.controls
        ]
        title = "ln perplexity" if name == "perplexity" else LABELS[name]
        if rows:
            sections.append(_format_table([f"{title} minus {study.schemes[0]}", *columns], rows))
    notes = [f"- {footnote}" for footnote in footnotes(study)]
    sections.append("\n".join([*notes, *provenance.splitlines()]))
    return "\n\n".join(sections) + "\n"


def _format_table(head: list[str], rows: list[list[str]]) -> str:
    table = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _format_difference(study: Study, scheme: str, number: int, name: Score) -> str:
    """Format a scheme's difference from the first scheme, its interval, and "=" if equivalent.

    If there is no interval, return "-".
    """
    comparison = analyze_bucket(study, number, name).comparisons.get(scheme)
    if comparison is None or comparison.difference is None or comparison.interval is None:
        return "-"
    low, high = comparison.interval
    spec = "+z.3f" if name == "perplexity" else "+z.1f"
    equivalent = name in MARGINS and comparison.interval.is_within(MARGINS[name])
    return f"{comparison.difference:{spec}} [{low:{spec}} {high:{spec}}]{' =' * equivalent}"


def _format_cell(study: Study, scheme: str, number: int, name: Score) -> str:
    """Format a scheme's mean and standard deviation, with "*" if the difference is significant.

    If the scheme has no scores, return "-".
    """
    if scheme not in study.curves:
        return "-"
    values = study.curves[scheme][number][name]
    # Show perplexities near 1 with one more digit.
    digits = DIGITS[name] + (name == "perplexity" and statistics.fmean(values) < 2)
    mean = format_mean(values, digits)
    comparison = analyze_bucket(study, number, name).comparisons.get(scheme)
    interval = comparison.interval if comparison is not None else None
    return f"{mean}\\*" if interval and interval.excludes_zero else mean


def footnotes(study: Study) -> Sequence[str]:
    """Return notes that explain the tables and list missing scores."""
    seeds = sorted({seed for by_scheme in study.seeds.values() for seed in by_scheme})
    exceptions = _describe_exceptions(study)
    limits = ", except for rows that a note below names" if exceptions else ""
    notes = [
        f"Training sentences have at most L = {study.max_training_length} tokens, including EOS. "
        "The length of a sentence pair is the length of its source or target, whichever is longer. "
        f"The buckets contain the sentences of the {_describe_sets(study.sets)}.",
        "Perplexity is per token of the reference, without label smoothing; ± is the standard "
        f"deviation over a row's random seeds (in all rows: {', '.join(map(str, seeds))}).",
        f"\\*: the row differs significantly from {study.schemes[0]} (with 95% confidence for all "
        f"rows in all {len(study.buckets)} buckets of the table together, by Dunnett's method with "
        "seeds as blocks and Bonferroni's correction for the buckets, and for perplexities by "
        "their logarithms). In the figure, every mean outside its bucket's gray band differs "
        f"significantly{limits}.",
        *exceptions,
        *(
            _describe_control(study, name, copied)
            for name, copied in study.controls.items()
            if {name, copied} <= study.curves.keys()
        ),
    ]
    margins = ", ".join(
        f"{MARGINS[name]:g} {'ln perplexity' if name == 'perplexity' else LABELS[name]}"
        for name in ("perplexity", study.metric)
        if name in MARGINS
    )
    notes.append(
        f"The intervals of the differences from {study.schemes[0]} belong to the same family. =: "
        f"the whole interval is within the margin ({margins}), so the row is equivalent to "
        f"{study.schemes[0]}."
    )
    if study.metric == "bleu":
        notes.append(
            f"BLEU is computed separately for each bucket ({study.bleu_signature}). Different "
            "buckets contain different sentences, so compare rows rather than columns."
        )
    return [*notes, *study.missing]


def _describe_sets(sets: Sequence[str]) -> str:
    names = [name.replace("dev", "development") for name in sets]
    return f"{' and '.join(names)} set{'s' * (len(names) > 1)}"


def to_csv(study: Study) -> str:
    """Return CSV with one line for each combination of scheme, bucket, score, and seed."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(
        ["row", "max_training_length", "above", "end", "sentences", "score", "seed", "value"]
    )
    for scheme, curve in study.curves.items():
        for bucket, scores in zip(study.buckets, curve, strict=True):
            bounds = f"{bucket.above:g}", f"{bucket.end:g}"
            columns = study.max_training_length, *bounds, len(bucket.indices)
            for name, values in scores.items():
                for seed, value in zip(study.seeds[scheme], values, strict=True):
                    table.writerow([scheme, *columns, name, seed, f"{value:.6g}"])
    return out.getvalue()
