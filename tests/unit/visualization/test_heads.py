"""Test the head-importance figure."""

import numpy as np
from pictures import axes_of, image_of, lines_of

from transformer_jax.visualization.heads import draw_heads


def test_heads_show_each_increase_and_the_limit() -> None:
    increases = {"encoder": np.array([[0.1, -0.3]]), "cross": np.array([[0.2, 0.0]])}
    panels = axes_of(draw_heads(increases, np.array([2.0, 2.1, 2.6]), 2.5))
    for kind, values in increases.items():
        np.testing.assert_array_equal(image_of(panels[kind]), values)
        # Zero is in the middle of the colormap.
        assert panels[kind].images[0].get_clim() == (-0.3, 0.3)
    lines = lines_of(panels["pruning"])
    assert lines.pop("acceptable loss") == [2.5, 2.5]
    assert list(lines.values()) == [[2.0, 2.1, 2.6]]
