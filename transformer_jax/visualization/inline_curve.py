"""Small curves in HTML, drawn without matplotlib, which is slow to import."""

import math
from collections.abc import Sequence


def inline_curve(
    x: Sequence[float], y: Sequence[float], *, width: int = 240, height: int = 60
) -> str:
    """Return a curve as inline SVG for HTML, or "" if there are fewer than two distinct x values.

    The curve has the same color as the surrounding text. The axes are linear and extend from the
    lowest to the highest value. Points with non-finite coordinates are omitted.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len({a for a, _ in points}) < 2:
        return ""
    margin = 4
    x_low, x_high = (f(a for a, _ in points) for f in (min, max))
    y_low, y_high = (f(b for _, b in points) for f in (min, max))
    x_scale = (width - 2 * margin) / (x_high - x_low)
    y_scale = (height - 2 * margin) / ((y_high - y_low) or 1.0)
    coordinates = " ".join(
        f"{margin + (a - x_low) * x_scale:.1f},{height - margin - (b - y_low) * y_scale:.1f}"
        for a, b in points
    )
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f'<polyline points="{coordinates}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        "</svg>"
    )
