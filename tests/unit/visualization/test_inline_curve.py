"""Test the small curves in run summaries."""

import math
import re

from transformer_jax.visualization.inline_curve import inline_curve


def test_an_inline_curve_scales_finite_points_to_its_frame() -> None:
    svg = inline_curve([0, 5, 10, 20], [4.0, math.nan, 1.0, 0.0], width=108, height=58)
    [points] = re.findall(r'points="([^"]+)"', svg)
    assert points == "4.0,4.0 54.0,41.5 104.0,54.0"
    assert inline_curve([1], [2.0]) == ""
    assert inline_curve([], []) == ""
    assert "polyline" in inline_curve([1, 2], [3.0, 3.0])
