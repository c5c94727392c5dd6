"""Plots of losses, training metrics, learning rates, and positional encodings.

Shapes: P points, T positions, D d_model, K offsets.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from transformer_jax.visualization.style import DIVERGING, GRID, Picture, add_legend, line_style
from transformer_jax.visualization.text import printable_label

MAX_COLUMNS = 3
# The units of metrics, keyed by the last part of the metric's name. Other metrics have no unit.
UNITS = {
    "loss": "nats per token",
    "smoothed_loss": "nats per token",
    "tokens_per_second": "tokens per second",
    "time": "Unix seconds",
}
# Curves with fewer points than this number have a marker at each point.
MAX_MARKERS = 20


class Curve(NamedTuple):
    """A line with a band around it."""

    label: str
    x: Shaped[np.ndarray, " P"]
    y: Float[np.ndarray, " P"]
    low: Float[np.ndarray, " P"]
    """The lower edge of the band, which equals `y` if there is no band."""
    high: Float[np.ndarray, " P"]
    """The upper edge of the band."""


def average_runs(
    label: str, runs: Sequence[Mapping[int, float]], *, geometric: bool = False
) -> Curve:
    """Return the mean (geometric for perplexities) and range at the steps that all runs share."""
    shared = sorted(set.intersection(*map(set, runs))) if runs else []
    values = [[run[step] for run in runs] for step in shared]
    y = [_mean(row, geometric=geometric) for row in values]
    low, high = ([f(row) for row in values] for f in (min, max))
    return Curve(label, np.array(shared, int), *(np.array(z, float) for z in (y, low, high)))


def _mean(values: Sequence[float], *, geometric: bool) -> float:
    # The geometric mean of a single value can differ from that value in the last bit.
    if geometric and len(values) > 1 and all(0 < x < math.inf for x in values):
        return statistics.geometric_mean(values)
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        # The sum overflowed or contained infinities of both signs.
        return math.nan


def draw_curves(panels: Mapping[str, Sequence[Curve]]) -> Picture:
    """Plot a panel for each name; curves at the same index have the same color and line style."""
    columns = min(len(panels), MAX_COLUMNS)
    rows = math.ceil(len(panels) / MAX_COLUMNS)
    figure = Figure(figsize=(7 if columns == 1 else 4 * columns, 3.6 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=False):
        shown = [(number, curve) for number, curve in enumerate(curves) if len(curve.x)]
        lines = [draw_curve(axes, curve, number) for number, curve in shown]
        unit = UNITS.get(name.rpartition("/")[2])
        label = name if unit is None else f"{name}, in {unit}"
        axes.set(xlabel="step", ylabel=printable_label(label))
        axes.grid(**GRID)
        if "perplexity" in name:
            use_log_axis(axes, [value for curve in curves for value in curve.y])
        if len(curves) > 1:
            add_legend(axes, lines)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    return Picture(figure)


def draw_curve(axes: Axes, curve: Curve, number: int) -> Line2D:
    """Plot a curve in the color and line style of its number, with its band; return its line."""
    color, style = line_style(number)
    if not np.array_equal(curve.low, curve.high):
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    label, marker = printable_label(curve.label), "o" if len(curve.x) < MAX_MARKERS else ""
    [line] = axes.plot(curve.x, curve.y, label=label, color=color, linestyle=style, linewidth=1.6)
    line.set(marker=marker, markersize=3)
    return line


def use_log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Use a log axis with plain-number labels if the values span a factor of four or more."""
    positive = [value for value in values if 0 < value < math.inf]
    if not positive or max(positive) < 4 * min(positive):
        return
    axes.set_yscale("log")
    decades = math.log10(max(positive) / min(positive))
    factors = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=factors))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_losses(by_position: Curve, by_length: Curve) -> Picture:
    """Plot the loss in nats per token by position and by sentence length."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    titles = ("Loss by position", "Loss by sentence length")
    labels = ("position in the target, in tokens", "length of the target, in tokens")
    panels = zip(figure.subplots(1, 2), (by_position, by_length), titles, labels, strict=True)
    for axes, curve, title, label in panels:
        draw_curve(axes, curve, 0)
        axes.set(title=title, xlabel=label, ylabel="loss in nats per token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(**GRID)
    return Picture(figure)


def draw_schedules(
    steps: Int[np.ndarray, " P"], panels: Mapping[str, Mapping[str, Float[np.ndarray, " P"]]]
) -> Picture:
    """Plot the learning rate by step, with a panel per title; the first line is the reference."""
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for number, (label, rates) in enumerate(lines.items()):
            color, style = line_style(number)
            options = {"label": label, "linewidth": 1.4 if number else 2.4}
            axes.plot(steps, rates, color=color, linestyle=style, **options)
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(**GRID)
        add_legend(axes)
    all_axes[0].set_ylabel("learning rate")
    return Picture(figure)


# Singular values below this fraction of the largest one are treated as float32 rounding errors.
MIN_SINGULAR_VALUE = 1e-5
# Residuals smaller than this value are plotted at this value.
MIN_RESIDUAL = 1e-5
MAX_OFFSETS = 33


def dot_products(table: Float[np.ndarray, "T D"], num_offsets: int) -> Float[np.ndarray, " K"]:
    """Return the mean dot product of PE(pos) and PE(pos + k) for k from 0 to `num_offsets` - 1."""
    products = table.astype(float) @ table.T.astype(float)
    return np.array([np.diagonal(products, offset).mean() for offset in range(num_offsets)])


def fit_linear_map(
    table: Float[np.ndarray, "T D"], offset: int
) -> tuple[Float[np.ndarray, "D D"], float]:
    """Fit the least-squares matrix M that maps PE(pos) to PE(pos + offset) at every other position.

    Also return the relative error at the other positions: the root-mean-square error, divided by
    the root-mean-square deviation from the mean. It is 0 for a linear map, and 1 or more if M
    predicts nothing.
    """
    before, after = (x.astype(float) for x in (table[: len(table) - offset], table[offset:]))
    transposed = np.linalg.lstsq(before[::2], after[::2], rcond=MIN_SINGULAR_VALUE)[0]
    errors, spread = before[1::2] @ transposed - after[1::2], after[1::2] - after.mean(axis=0)
    return transposed.T, float(np.sqrt((errors**2).sum() / (spread**2).sum()))


def draw_positions(tables: Mapping[str, Float[np.ndarray, "T D"]], *, offset: int = 1) -> Picture:
    """Plot each table, its linear map to PE(pos + offset), its dot products, and its residuals."""
    num_tables = len(tables)
    is_one = num_tables == 1
    height = 3.2 if is_one else 6.4
    figure = Figure(figsize=(max(3.4 * num_tables, 8.5), height + 3.0), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(height, 3.0), squeeze=False)[:, 0]
    panels = upper.subplots(*(1, 2) if is_one else (2, num_tables), squeeze=False)
    pairs = panels if is_one else panels.T
    for (axes, matrix_axes), (name, table) in zip(pairs, tables.items(), strict=True):
        matrix, residual = fit_linear_map(table, offset)
        number = f"{residual:.0e}" if residual < 0.01 else f"{residual:.2f}"
        axes.set(title=name, ylabel="position")
        title = f"map to PE(pos + {offset}), residual {number}"
        matrix_axes.set(title=title, ylabel="dimension")
        for panel, values in ((axes, table), (matrix_axes, matrix)):
            limit = float(np.abs(values).max()) or 1.0
            options = {"cmap": DIVERGING, "aspect": "auto", "interpolation": "nearest"}
            image = panel.imshow(values, vmin=-limit, vmax=limit, **options)
            panel.set_xlabel("dimension")
            upper.colorbar(image, ax=panel)
    _draw_measures(lower, tables)
    return Picture(figure)


def _draw_measures(figure: SubFigure, tables: Mapping[str, Float[np.ndarray, "T D"]]) -> None:
    products, residuals = figure.subplots(1, 2)
    for number, (name, table) in enumerate(tables.items()):
        num_offsets = min(len(table) // 2, MAX_OFFSETS)
        offsets = range(num_offsets)
        errors = [fit_linear_map(table, k)[1] for k in offsets[1:]]
        color, line = line_style(number)
        style = {"label": name, "linewidth": 1.6, "color": color, "linestyle": line}
        products.plot(offsets, dot_products(table, num_offsets), **style)
        residuals.plot(offsets[1:], np.maximum(errors, MIN_RESIDUAL), **style)
    title = "Dot product of PE(pos) and PE(pos + k)"
    products.set(title=title, xlabel="offset k", ylabel="mean over positions")
    title = "Residual of the linear map to PE(pos + k)"
    residuals.set(title=title, xlabel="offset k", ylabel="relative error", yscale="log")
    low, high = residuals.get_ylim()
    residuals.set_ylim(min(low, MIN_RESIDUAL / 2), max(high, 2.0))
    for axes in (products, residuals):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(**GRID)
        if len(tables) > 1:
            add_legend(axes)
