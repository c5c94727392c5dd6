"""Plots of the learning rate for several widths and warmup lengths (section 5.3, equation 3).

Shapes: P points.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from transformer_jax.visualization.style import GRID, Picture, add_legend, line_style


def draw_schedules(
    steps: Int[np.ndarray, " P"], panels: Mapping[str, Mapping[str, Float[np.ndarray, " P"]]]
) -> Picture:
    """Plot the learning rate by step, with one panel per title and one line per label.

    The first line in each panel is the reference and is drawn wider than the others.
    """
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
