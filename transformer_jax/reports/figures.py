"""Draw a report's figures as SVG. The same runs always produce byte-identical figures."""

import itertools
import statistics

from matplotlib.figure import Figure

from transformer_jax.inference.history import metric_by_step, metrics_table
from transformer_jax.reports.results import SPLITS, Results, RowResult
from transformer_jax.visualization.plots import Curve, average_runs, draw_curve, use_log_axis
from transformer_jax.visualization.style import PALETTE, Picture
from transformer_jax.visualization.text import printable_label

# Larger perplexities and NaN are plotted at this value, which exceeds the perplexity of uniform
# predictions over any vocabulary.
MAX_PERPLEXITY = 1e6
OTHER_ROWS = "other rows"
PAPER, NOT_SIGNIFICANT = "in the paper", "not significant, {} set"
HERE = "here, {} set, with 95% intervals"
# If a row's scores vary widely across seeds, its interval may be much wider than those of other
# rows. The limit of the axis is this many typical half-widths beyond the farthest point, and an
# interval is cut off there if it extends to more than twice the limit.
MAX_HALVES = 3.0
# A longer name of a row does not fit below an axis.
MAX_LABEL = 24
# In a legend, the approximate widths of a character and of a line with its margins, in inches.
LEGEND_CHARACTER, LEGEND_LINE = 0.075, 0.6
# The size in inches. On a narrow screen, a figure of this width is still readable.
WIDTH = 6.4
CURVES_CAPTION = (
    "Perplexity on the development set by step. Each line is the geometric mean over seeds, and "
    "its band extends from the lowest to the highest value over seeds."
)
RATIOS_CAPTION = (
    "Difference in log perplexity from the first row, here (circles, with simultaneous 95% "
    "intervals) and, if it is known, in the paper (diamonds). Lower is better, and +0.1 means "
    "about 10% higher perplexity. A row whose interval includes 0 does not differ significantly "
    "from the first row. For a typical row, the circle for the {split} set is then in the gray "
    "band."
)
OPEN_CAPTION = " Open circles have no interval, because there are too few seeds."
CUT_CAPTION = " Intervals that are much wider than typical ones end at the edge of the figure."
CONTROL_CAPTION = " A control's interval is Welch's, and the gray band does not apply to a control."


def draw_curves(results: Results) -> Picture:
    """Plot perplexity by step, with a mean and a band for each row.

    The first row and the seven that differ most from it are in color, and others are gray lines.
    """
    curves = {name: _mean_curve(row) for name, row in results.rows.items()}
    names = [name for name in _by_importance(results) if len(curves[name].x)]
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    for name in names[len(PALETTE) :]:
        label = OTHER_ROWS if name == names[-1] else None
        curve = curves[name]
        axes.plot(curve.x, curve.y, color="#BBBBBB", linewidth=1.0, label=label)
    in_color = set(names[: len(PALETTE)])
    for number, name in enumerate(name for name in results.rows if name in in_color):
        draw_curve(axes, curves[name], number)
    axes.set(xlabel="step", ylabel="perplexity, development set")
    use_log_axis(axes, [y for name in names for y in curves[name].y])
    return _finish(figure, columns=4)


def _mean_curve(row: RowResult) -> Curve:
    """Return the geometric mean and range of perplexity over seeds at steps shared by all seeds."""
    # A run that has not started has no folder.
    folders = [x.run.path for x in row.trained if x.run.path.is_dir()]
    tables = [metrics_table(folder) for folder in folders]
    curves = [metric_by_step(table, "dev/perplexity") for table in tables]
    # Comparisons with NaN are false, so NaN also becomes `MAX_PERPLEXITY`.
    runs = [
        {step: x if x <= MAX_PERPLEXITY else MAX_PERPLEXITY for step, x in curve.items()}
        for curve in curves
        if curve
    ]
    return average_runs(printable_label(row.name), runs, geometric=True)


def _by_importance(results: Results) -> list[str]:
    """Return the first row's name, and then the other names in descending order of difference."""

    def magnitude(name: str) -> float:
        difference = results.compare(name, "perplexity", results.splits[-1]).difference
        return 0.0 if difference is None else abs(difference)

    base, *others = results.rows
    return [base, *sorted(others, key=magnitude, reverse=True)]


def describe_ratios(results: Results) -> str:
    """Return the caption of `draw_ratios`."""
    split = results.splits[-1]
    caption = RATIOS_CAPTION.format(split="development" if split == "dev" else "test")
    has_control = any(row.is_control for row in results.rows.values())
    is_cut = _find_limit(results) is not None
    pairs = itertools.product(list(results.rows)[1:], results.splits)
    found = [results.compare(name, "perplexity", split) for name, split in pairs]
    is_open = any(x.interval is None and x.difference is not None for x in found)
    return caption + OPEN_CAPTION * is_open + CUT_CAPTION * is_cut + CONTROL_CAPTION * has_control


def _find_half(results: Results) -> float | None:
    """Return half the width of a typical interval on the set that the answers use."""
    comparisons = results.analyses[results.splits[-1]]["perplexity"].comparisons.values()
    intervals = [comparison.interval for comparison in comparisons if comparison.interval]
    if not intervals:
        return None
    return statistics.median((high - low) / 2 for low, high in intervals)


def _find_limit(results: Results) -> float | None:
    """Return the largest absolute value on the axis of `draw_ratios` if intervals are cut off."""
    half = _find_half(results)
    if half is None:
        return None
    points = [
        results.compare(name, "perplexity", split).difference
        for split in results.splits
        for name in results.rows
    ]
    points += [results.paper_difference(name, "perplexity") for name in results.rows]
    limit = max(abs(x) for x in points if x is not None) + MAX_HALVES * half
    comparisons = results.analyses[results.splits[-1]]["perplexity"].comparisons.values()
    ends = (max(-x.interval.low, x.interval.high) for x in comparisons if x.interval)
    return limit if max(ends) > 2 * limit else None


def draw_ratios(results: Results) -> Picture:
    """Plot each row's difference in log perplexity from the first row, here and in the paper."""
    rows, splits = list(results.rows), results.splits
    figure = Figure(figsize=(WIDTH, 1.8 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.margins(x=0.08)
    for number, split in enumerate(splits):
        # The darker color marks the set that the answers use.
        color = PALETTE[1] if split == splits[-1] else PALETTE[6]
        for y, name in enumerate(rows):
            comparison = results.compare(name, "perplexity", split)
            if (ours := comparison.difference) is not None:
                low, high = comparison.interval or (ours, ours)
                bar = {"xerr": [[ours - low], [high - ours]], "capsize": 3, "markersize": 4}
                place = y + 0.24 * (number - (len(splits) - 1) / 2)
                label = None if y else HERE.format(split)
                drawn = axes.errorbar(ours, place, color=color, marker="o", label=label, **bar)
                if comparison.interval is None and y:
                    point, caps, _ = drawn
                    point.set_markerfacecolor("none")
                    for cap in caps:
                        cap.set_visible(False)
    for y, name in enumerate(rows):
        if (paper := results.paper_difference(name, "perplexity")) is not None:
            diamond = {"marker": "D", "markerfacecolor": "none", "linestyle": "none"}
            axes.plot(paper, y, color=PALETTE[2], label=None if y else PAPER, **diamond)
    if (half := _find_half(results)) is not None:
        band = {"color": "#DDDDDD", "linewidth": 0, "zorder": 0}
        axes.axvspan(-half, half, label=NOT_SIGNIFICANT.format(splits[-1]), **band)
    if (limit := _find_limit(results)) is not None:
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, -1.08 * limit), min(high, 1.08 * limit))
    axes.axvline(0.0, color="black", linewidth=0.8)
    labels = [printable_label(name) for name in rows]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    base = printable_label(results.base.name)
    base = base if len(base) <= MAX_LABEL else "the first row"
    axes.set_xlabel(f"ln perplexity - ln perplexity of {base}")
    return _finish(figure, columns=1)


def _finish(figure: Figure, columns: int) -> Picture:
    [axes] = figure.axes
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # In the legend, list the rows in their original order, and then the other entries.
        sets = [label.format(split) for label in (HERE, NOT_SIGNIFICANT) for split in SPLITS]
        last = (*sets[:2], PAPER, *sets[2:], OTHER_ROWS)
        places = {label: place for place, label in enumerate(last, start=1)}
        pairs = zip(handles, labels, strict=True)
        handles, labels = zip(*sorted(pairs, key=lambda pair: places.get(pair[1], 0)), strict=True)
        width = LEGEND_LINE + LEGEND_CHARACTER * max(map(len, labels))
        columns = max(1, min(columns, int(WIDTH / width)))
        figure.legend(handles, labels, loc="outside lower left", fontsize="small", ncols=columns)
    return Picture(figure)
