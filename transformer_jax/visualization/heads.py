"""Plots of attention-head importance and of the loss as heads are pruned.

Shapes: L layers, H heads, P numbers of pruned heads (0, 1, 2, ...).
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from transformer_jax.visualization.style import DIVERGING, GRID, PALETTE, Picture, add_legend


def draw_heads(
    increases: Mapping[str, Float[np.ndarray, "L H"]],
    losses: Float[np.ndarray, " P"],
    limit: float,
) -> Picture:
    """Plot heat maps of head importance by kind of attention, and the loss as heads are pruned.

    Args:
        increases: the increase in loss when each head is masked, in nats per token.
        losses: the loss without the k least important heads, for k = 0, 1, 2, and so on.
        limit: the largest acceptable loss.
    """
    num_layers, num_heads = next(iter(increases.values())).shape
    map_width, map_height = 1.0 + 0.34 * max(num_heads, 5), 1.8 + 0.34 * num_layers
    figure = Figure(
        figsize=(max(map_width * len(increases), 8.0), map_height + 3.0), layout="constrained"
    )
    heights = (map_height, 3.0)
    upper, lower = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    maps = upper.subplots(1, len(increases), squeeze=False)[0]
    largest = max(float(np.abs(values).max()) for values in increases.values()) or 1.0
    for axes, (kind, values) in zip(maps, increases.items(), strict=True):
        image = axes.imshow(values, cmap=DIVERGING, vmin=-largest, vmax=largest, aspect="auto")
        axes.set(title=kind, xlabel="head")
        axes.set_xticks(range(num_heads), [str(i + 1) for i in range(num_heads)])
        axes.set_yticks(range(num_layers), [str(i + 1) for i in range(num_layers)])
    maps[0].set_ylabel("layer")
    options = {"location": "bottom", "aspect": 50, "ticks": MaxNLocator(5)}
    bar = upper.colorbar(image, ax=maps, **options)
    bar.set_label("increase in loss without the head, in nats per token")
    curve = lower.subplots()
    curve.plot(range(len(losses)), losses, color=PALETTE[1], marker="o", markersize=3)
    curve.axhline(limit, color=PALETTE[2], linestyle="--", label="acceptable loss")
    curve.set(title="pruning", xlabel="number of masked heads, least important first")
    curve.set_ylabel("loss in nats per token")
    curve.xaxis.set_major_locator(MaxNLocator(integer=True))
    curve.grid(**GRID)
    add_legend(curve)
    return Picture(figure)
