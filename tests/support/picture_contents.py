"""Read the numbers that a figure shows."""

import numpy as np
from matplotlib.axes import Axes
from oracles import floats

from transformer_jax.visualization.style import Picture


def axes_of(picture: Picture) -> dict[str, Axes]:
    """Return a figure's panels, keyed by title, or by y-axis label if there is no title."""
    return {axes.get_title() or axes.get_ylabel(): axes for axes in picture.figure.axes}


def lines_of(axes: Axes) -> dict[str, list[float]]:
    return {str(line.get_label()): floats(line.get_ydata()).tolist() for line in axes.lines}


def image_of(axes: Axes) -> np.ndarray:
    [image] = axes.images
    return np.asarray(image.get_array())
