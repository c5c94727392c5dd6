"""Box diagrams, like figures 1 and 2 of the paper. Data flows from bottom to top."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from transformer_jax.visualization.style import Picture

WIDTH, HEIGHT, GAP, COLUMN_GAP = 2.6, 0.5, 0.3, 1.3
# The colors in figure 1 of the paper, keyed by a word in the box's label.
COLORS = {
    "attention": "#ffe1bb",
    "norm": "#f2f4c1",
    "feed": "#c2e8f7",
    "embedding": "#fce0e1",
    "linear": "#dcdff0",
    "softmax": "#cbe7cf",
}


@dataclass(frozen=True)
class Column:
    """A stack of boxes."""

    input: str
    """The text below the first box."""
    boxes: Sequence[str]
    """The labels of the boxes, from the first operation to the last."""
    output: str = ""
    """The text above the last box."""
    repeated: range = range(0)
    """The indices of the boxes that form a repeated layer."""
    times: str = ""
    """The label that shows the number of repetitions, such as "6 x"."""
    reads: int | None = None
    """The index of the box that also reads the previous column's output, or None."""


def draw_columns(columns: Sequence[Column]) -> Picture:
    """Draw the columns next to each other, with arrows between consecutive boxes."""
    height = max(len(column.boxes) for column in columns) + 2
    width = len(columns) * (WIDTH + COLUMN_GAP)
    figure = Figure(figsize=(width * 0.8, height * (HEIGHT + GAP) * 0.8))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-COLUMN_GAP, width - COLUMN_GAP / 2), ylim=(-1, height * (HEIGHT + GAP) - 0.8))
    axes.set_axis_off()
    for index, column in enumerate(columns):
        left = index * (WIDTH + COLUMN_GAP)
        _draw_column(axes, column, left)
        if column.reads is not None:
            _draw_link(axes, columns[index - 1], column.reads, left)
    return Picture(figure)


def _bottom(box: int) -> float:
    return box * (HEIGHT + GAP)


def _draw_column(axes: Axes, column: Column, left: float) -> None:
    middle, top = left + WIDTH / 2, _bottom(len(column.boxes))
    if column.repeated:
        low, high = _bottom(column.repeated[0]), _bottom(column.repeated[-1]) + HEIGHT
        size = WIDTH + 0.3, high - low + 0.3
        axes.add_patch(_box(left - 0.15, low - 0.15, *size, "#f5f5f5"))
        axes.text(left - 0.3, (low + high) / 2, column.times, ha="right", va="center")
    for index, label in enumerate(column.boxes):
        color = next((c for word, c in COLORS.items() if word in label.lower()), "white")
        axes.add_patch(_box(left, _bottom(index), WIDTH, HEIGHT, color))
        axes.text(middle, _bottom(index) + HEIGHT / 2, label, ha="center", va="center", size=9)
    for index in range(len(column.boxes) + bool(column.output)):
        _arrow(axes, (middle, _bottom(index) - GAP), (middle, _bottom(index)))
    axes.text(middle, -GAP - 0.1, column.input, ha="center", va="top", size=9)
    axes.text(middle, top + 0.05, column.output, ha="center", va="bottom", size=9)


def _draw_link(axes: Axes, source: Column, box: int, left: float) -> None:
    """Draw an arrow from the last box of `source` to a box in the column at `left`."""
    right = left - COLUMN_GAP
    start = _bottom(len(source.boxes) - 1) + HEIGHT / 2
    end = left, _bottom(box) + HEIGHT / 2
    middle = right + 0.4 * COLUMN_GAP
    axes.plot([right, middle, middle], [start, start, end[1]], color="black", linewidth=1)
    _arrow(axes, (middle, end[1]), end)


def _box(left: float, bottom: float, width: float, height: float, color: str) -> FancyBboxPatch:
    style = "round,pad=0,rounding_size=0.1"
    return FancyBboxPatch((left, bottom), width, height, boxstyle=style, fc=color, ec="black")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
