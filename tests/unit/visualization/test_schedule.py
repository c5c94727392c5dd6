"""Test the learning-rate schedule figure."""

import numpy as np
from pictures import axes_of, lines_of

from transformer_jax.visualization.schedule import draw_schedules


def test_schedules_show_each_line_in_its_panel() -> None:
    steps = np.array([1, 2, 4])
    lines = {"a": steps / 1.0, "b": steps / 2.0}
    panels = axes_of(draw_schedules(steps, {"widths": lines, "warmups": {"c": steps / 4.0}}))
    assert lines_of(panels["widths"]) == {"a": [1.0, 2.0, 4.0], "b": [0.5, 1.0, 2.0]}
    assert lines_of(panels["warmups"]) == {"c": [0.25, 0.5, 1.0]}
