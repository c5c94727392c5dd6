"""Static figures of attention weights and of head importance, drawn with matplotlib.

Shapes: Q queries, K keys, L layers, H heads, P counts of pruned heads (0, 1, 2, ...).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from transformer_jax.visualization.attention_maps import AttentionMap, AttentionMaps, select
from transformer_jax.visualization.attention_views import Resolved, Selection
from transformer_jax.visualization.style import DIVERGING, GRID, PALETTE, Picture, add_legend
from transformer_jax.visualization.text import printable_label, truncate

# The heads' colors, which repeat after eight heads. The colors are color-blind safe, like the
# palette for plots, and dark enough for thin lines. attention_page/style.css has the same colors.
HEAD_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#c0559a"),
    *("#b07d00", "#2d9fe0", "#882255", "#6b6b6b"),
)
HEAT, SCALE = "Blues", Normalize(0.0, 1.0)
# The smallest weight that is drawn: a line for a smaller weight would be invisible but would still
# enlarge the file.
MIN_WEIGHT = 0.01
# The maximum number of characters in a token's label; longer tokens are truncated.
MAX_TOKEN = 24
# Sizes in inches: the height of a token, the side of a heat map in the grid, the width of a
# character in a token and in the title, and the height of a row in the legend and in the title.
ROW, CELL, CHARACTER, TITLE_CHARACTER, TEXT_ROW = 0.22, 1.1, 0.085, 0.072, 0.19
SIZE = "small"


def draw_attention(maps: AttentionMaps, selection: Selection) -> Picture:
    """Draw the selected attention weights in the selected view."""
    chosen, indices = select(maps, selection)
    if selection.view == "grid":
        return Picture(_draw_grid(chosen))
    if selection.view == "alignment":
        return Picture(_draw_alignment(chosen, indices))
    return Picture(_draw_heads(chosen, indices))


def _draw_heads(chosen: AttentionMap, indices: Resolved) -> Figure:
    """Draw the queries and the keys as columns of tokens, joined by lines in the heads' colors."""
    widths = [_width(tokens) for tokens in (chosen.queries, chosen.keys)]
    rows = max(len(chosen.queries), len(chosen.keys))
    width = sum(widths) + 2.4
    # Labels with two-digit head numbers are wider.
    columns = max(1, int(width / (0.9 if max(indices.heads) < 9 else 1.0)))
    bottom = 0.5 + TEXT_ROW * max(0, math.ceil(len(indices.heads) / columns) - 2)
    title = _wrap(_title(chosen, indices), width)
    top = 0.5 + TEXT_ROW * title.count("\n")
    height = (rows + 1.5) * ROW + top + bottom
    figure = Figure(figsize=(width, height))
    # This function places the axes, so matplotlib must not apply the user's default layout.
    figure.set_layout_engine("none")
    left, right = widths[0] / width, 1 - widths[1] / width
    bottom, top = bottom / height, 1 - top / height
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    axes.set(xlim=(0, 1), ylim=(rows - 0.5, -1.5))
    axes.set_axis_off()
    for number, head in enumerate(indices.heads):
        shift = ((number + 0.5) / len(indices.heads) - 0.5) * 0.4
        axes.add_collection(_head_lines(chosen.weights[indices.layer, head], head, shift, indices))
    for x, align, tokens, label in (
        (-0.03, "right", chosen.queries, chosen.query_label),
        (1.03, "left", chosen.keys, chosen.key_label),
    ):
        axes.text(x, -1.2, label, ha=align, va="center", size=SIZE, color="#595959")
        for row, token in enumerate(tokens):
            weight = "bold" if x < 0 and row == indices.position else "normal"
            style = {"size": SIZE, "weight": weight}
            axes.text(x, row, _label(token), ha=align, va="center", **style)
    figure.suptitle(title, size="medium", y=1 - 0.12 / height)
    patches = [Patch(color=_color(head), label=f"head {head + 1}") for head in indices.heads]
    figure.legend(handles=patches, loc="lower center", ncols=columns, frameon=False, fontsize=SIZE)
    return figure


def _head_lines(
    weights: Float[np.ndarray, "Q K"], head: int, shift: float, indices: Resolved
) -> LineCollection:
    """Return a line for each visible weight of a head. The line's opacity equals the weight."""
    is_shown = weights >= MIN_WEIGHT
    if indices.position is not None:
        is_shown &= (np.arange(len(weights)) == indices.position)[:, None]
    pairs = np.argwhere(is_shown)
    color = to_rgb(_color(head))
    return LineCollection(
        [[(0.0, query + shift), (1.0, key + shift)] for query, key in pairs],
        colors=[(*color, min(1.0, float(weights[query, key]))) for query, key in pairs],
        linewidths=1.4,
        capstyle="butt",
    )


def _draw_grid(chosen: AttentionMap) -> Figure:
    layers, heads = chosen.weights.shape[:2]
    size = (heads * CELL + 0.9, layers * CELL + 1.1)
    figure = Figure(figsize=size, layout="constrained")
    for row, all_axes in enumerate(figure.subplots(layers, heads, squeeze=False)):
        for head, axes in enumerate(all_axes):
            _draw_heat_map(axes, chosen.weights[row, head])
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(f"head {head + 1}", size=SIZE)
            if head == 0:
                axes.set_ylabel(f"layer {row + 1}", size=SIZE)
    _add_color_bar(figure)
    figure.suptitle(chosen.label.capitalize(), size="medium")
    label = f"rows: {chosen.query_label}s; columns: {chosen.key_label}s"
    figure.supxlabel(label, size=SIZE, color="#595959")
    return figure


def _draw_alignment(chosen: AttentionMap, indices: Resolved) -> Figure:
    """Draw a heat map, labeled with tokens, of the mean weights over a layer's selected heads."""
    weights = chosen.weights[indices.layer, list(indices.heads)].mean(axis=0)
    width, height = (ROW * len(tokens) for tokens in (chosen.keys, chosen.queries))
    size = (width + _width(chosen.queries) + 1.4, height + _width(chosen.keys) + 1.0)
    figure = Figure(figsize=(max(4.0, size[0]), size[1]), layout="constrained")
    axes = figure.subplots()
    _draw_heat_map(axes, weights)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(range(len(chosen.keys)), map(_label, chosen.keys), rotation=90, size=SIZE)
    axes.set_yticks(range(len(chosen.queries)), map(_label, chosen.queries), size=SIZE)
    if indices.position is not None:
        axes.get_yticklabels()[indices.position].set_fontweight("bold")
    axes.tick_params(length=0)
    axes.set(xlabel=chosen.key_label, ylabel=chosen.query_label)
    _add_color_bar(figure)
    mean = ", mean over heads" if len(indices.heads) > 1 else ""
    title = _wrap(f"{_title(chosen, indices)}{mean}", figure.get_figwidth())
    figure.suptitle(title, size="medium")
    return figure


def _draw_heat_map(axes: Axes, weights: Float[np.ndarray, "Q K"]) -> None:
    # With interpolation turned off, an SVG contains exactly one pixel for each weight.
    axes.imshow(weights, norm=SCALE, cmap=HEAT, aspect="auto", interpolation="none")


def _add_color_bar(figure: Figure) -> None:
    bar = figure.colorbar(ScalarMappable(SCALE, HEAT), ax=figure.axes, shrink=0.8, aspect=30)
    bar.set_label("weight", size=SIZE)
    bar.ax.tick_params(labelsize=SIZE)


def _title(chosen: AttentionMap, indices: Resolved) -> str:
    layers, heads = chosen.weights.shape[:2]
    title = f"{chosen.label.capitalize()}, layer {indices.layer + 1} of {layers}"
    if len(indices.heads) == heads:
        return title
    numbers = ", ".join(str(head + 1) for head in indices.heads)
    return f"{title}, head{'s' if len(indices.heads) > 1 else ''} {numbers}"


def _wrap(title: str, width: float) -> str:
    return textwrap.fill(title, int(width / TITLE_CHARACTER))


def _color(head: int) -> str:
    return HEAD_COLORS[head % len(HEAD_COLORS)]


def _label(token: str) -> str:
    return printable_label(truncate(token, MAX_TOKEN))


def _width(tokens: Sequence[str]) -> float:
    """Return the width of a column of tokens, in inches."""
    return max(1.2, 0.2 + CHARACTER * min(MAX_TOKEN, max(map(len, tokens))))


def draw_heads(
    increases: Mapping[str, Float[np.ndarray, "L H"]], losses: Float[np.ndarray, " P"], limit: float
) -> Picture:
    """Plot heat maps of head importance by kind of attention, and the loss as heads are pruned.

    Args:
        increases: the increase in loss when each head is masked, in nats per token.
        losses: the loss without the k least important heads, for k = 0, 1, 2, and so on.
        limit: the largest acceptable loss.
    """
    layers, heads = next(iter(increases.values())).shape
    map_width, map_height = 1.0 + 0.34 * max(heads, 5), 1.8 + 0.34 * layers
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
        axes.set_xticks(range(heads), [str(i + 1) for i in range(heads)])
        axes.set_yticks(range(layers), [str(i + 1) for i in range(layers)])
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
