"""Plots of positional encoding tables (section 3.5), and metrics of their structure.

Shapes: T positions, D d_model, K offsets.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from transformer_jax.visualization.style import DIVERGING, GRID, Picture, add_legend, line_style

# Singular values below this fraction of the largest one are treated as float32 rounding errors.
MIN_SINGULAR_VALUE = 1e-5
# Residuals smaller than this value are plotted at this value.
MIN_RESIDUAL = 1e-5
# The maximum number of offsets to plot.
MAX_OFFSETS = 33


def dot_products(table: Float[np.ndarray, "T D"], num_offsets: int) -> Float[np.ndarray, " K"]:
    """Return the mean dot product of PE(pos) and PE(pos + k) for k from 0 to `num_offsets` - 1.

    For sinusoids, the dot product depends only on k.
    """
    products = table.astype(float) @ table.T.astype(float)
    return np.array([np.diagonal(products, offset).mean() for offset in range(num_offsets)])


def fit_linear_map(
    table: Float[np.ndarray, "T D"], offset: int
) -> tuple[Float[np.ndarray, "D D"], float]:
    """Fit the least-squares matrix M that maps PE(pos) to PE(pos + offset).

    M is fitted to every other position. The second return value is the relative error at the
    remaining positions: the root-mean-square error, divided by the root-mean-square deviation of
    PE(pos + offset) from its mean. This error is 0 if PE(pos + offset) is a linear function of
    PE(pos), and 1 or more if M has no predictive power. At the fitted positions, the error would
    be 0 for any table with fewer positions than dimensions.
    """
    before, after = (x.astype(float) for x in (table[: len(table) - offset], table[offset:]))
    transposed = np.linalg.lstsq(before[::2], after[::2], rcond=MIN_SINGULAR_VALUE)[0]
    errors, spread = before[1::2] @ transposed - after[1::2], after[1::2] - after.mean(axis=0)
    return transposed.T, float(np.sqrt((errors**2).sum() / (spread**2).sum()))


def draw_positions(tables: Mapping[str, Float[np.ndarray, "T D"]], *, offset: int = 1) -> Picture:
    """Plot each table, its linear map from PE(pos) to PE(pos + offset), and two metrics.

    The metrics are the dot product of PE(pos) and PE(pos + k), and the residual of
    `fit_linear_map`.
    """
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
