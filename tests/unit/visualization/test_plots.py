"""Test that plots show the correct numbers and labels."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from oracles import floats
from oracles import sinusoid as sinusoid_oracle
from pictures import axes_of, image_of, lines_of

from transformer_jax.visualization.plots import (
    Curve,
    average_runs,
    dot_products,
    draw_curves,
    draw_losses,
    draw_positions,
    draw_schedules,
    fit_linear_map,
)
from transformer_jax.visualization.style import Picture

HOSTILE = "<script>$x$ & \"'"


@pytest.fixture(scope="module")
def picture() -> Picture:
    curve = average_runs(HOSTILE, [{1: 2.0, 2: 1.0}, {1: 4.0, 2: 1.0, 3: 0.5}])
    other = average_runs("other", [{1: 3.0, 2: 2.0}])
    return draw_curves({"dev/loss": [curve, other]})


def test_a_mean_curve_has_the_steps_of_all_runs_and_their_range() -> None:
    curve = average_runs("a", [{1: 2.0, 2: 1.0}, {1: 8.0, 2: 1.0, 3: 0.5}], geometric=True)
    assert (curve.x.tolist(), curve.y.tolist()) == ([1, 2], [4.0, 1.0])
    assert (curve.low.tolist(), curve.high.tolist()) == ([2.0, 1.0], [8.0, 1.0])
    assert average_runs("a", [{1: 2.0}, {1: 8.0}]).y.tolist() == [5.0]
    # A non-finite value affects only the mean at its step.
    diverged = [{1: 2.0, 2: math.inf}, {1: 8.0, 2: 8.0}]
    assert average_runs("a", diverged, geometric=True).y.tolist() == [4.0, math.inf]
    for high, low in ((math.inf, -math.inf), (1e308, 1e308)):
        assert np.isnan(average_runs("a", [{1: high}, {1: low}]).y).all()
    assert average_runs("a", []).x.size == 0


def test_curves_show_means_bands_and_labels(picture: Picture) -> None:
    axes = axes_of(picture)["dev/loss, in nats per token"]
    assert list(lines_of(axes).values()) == [[3.0, 1.0], [3.0, 2.0]]
    # Only the first curve averages several runs, so the figure has only one band.
    [band] = axes.collections
    assert floats(band.get_paths()[0].vertices)[:, 1].max() == 4.0
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 2


def test_labels_appear_as_text(picture: Picture) -> None:
    assert "<script>" not in picture.svg
    assert "&lt;script&gt;$x$ &amp; \"'" in picture.svg


def test_any_name_of_a_run_appears_in_the_legend() -> None:
    # The second name contains an escape character and a byte that is not valid UTF-8. Matplotlib's
    # font has no glyphs for the fourth name.
    names = ["_base", "a\x1b[0m\udcff", "$x$", "日本"]
    curves = [average_runs(name, [{1: 2.0, 2: 1.0}]) for name in names]
    picture = draw_curves({"$_y\n$": curves})
    shown = "".join(ET.fromstring(picture.svg).itertext())  # noqa: S314
    assert all(name in shown for name in ("_base", r"a\x1b[0m\udcff", "$x$", "日本"))
    assert picture._repr_png_()


def test_a_wide_range_of_perplexities_has_a_logarithmic_axis() -> None:
    wide, narrow = ([average_runs("a", [{1: high, 2: 4.0}])] for high in (400.0, 5.0))
    panels = axes_of(draw_curves({"dev/perplexity": wide, "test/perplexity": narrow, "loss": wide}))
    scales = [axes.get_yscale() for axes in panels.values()]
    assert scales == ["log", "linear", "linear"]
    labels = [tick.get_text() for tick in panels["dev/perplexity"].get_yticklabels()]
    assert "100" in labels


def test_the_losses_have_a_panel_for_positions_and_one_for_lengths() -> None:
    x, y = np.arange(1, 4), np.array([3.0, 2.0, 1.0])
    curve = Curve("dev", x, y, y - 0.5, y + 0.5)
    panels = axes_of(draw_losses(curve, curve._replace(y=2 * y)))
    assert lines_of(panels["Loss by position"]) == {"dev": [3.0, 2.0, 1.0]}
    assert lines_of(panels["Loss by sentence length"]) == {"dev": [6.0, 4.0, 2.0]}


def test_a_log_axis_has_labeled_ticks_even_for_a_narrow_range() -> None:
    curve = average_runs("a", [{30: 6.6, 60: 1.16, 90: 1.11}])
    figure = draw_curves({"dev/perplexity": [curve]}).figure
    figure.draw_without_rendering()
    [axes] = figure.axes
    low, high = axes.get_ylim()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    ticks = [
        float(x) for x, tick in zip(labels, axes.get_yticks(), strict=True) if low < tick < high
    ]
    assert ticks == [1.5, 2.0, 3.0, 5.0, 7.0]


def test_schedules_show_each_line_in_its_panel() -> None:
    steps = np.array([1, 2, 4])
    lines = {"a": steps / 1.0, "b": steps / 2.0}
    panels = axes_of(draw_schedules(steps, {"widths": lines, "warmups": {"c": steps / 4.0}}))
    assert lines_of(panels["widths"]) == {"a": [1.0, 2.0, 4.0], "b": [0.5, 1.0, 2.0]}
    assert lines_of(panels["warmups"]) == {"c": [0.25, 0.5, 1.0]}


SINUSOIDS = sinusoid_oracle(48, 16).astype(np.float32)
RANDOM = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)


def test_the_dot_product_of_sinusoids_depends_only_on_the_offset() -> None:
    products = dot_products(SINUSOIDS, 5)
    for offset in range(5):
        pairs = [float(SINUSOIDS[i] @ SINUSOIDS[i + offset]) for i in range(40)]
        np.testing.assert_allclose(pairs, products[offset], atol=1e-4)


@pytest.mark.parametrize("offset", [1, 7])
def test_a_linear_map_shifts_sinusoids_but_not_a_random_table(offset: int) -> None:
    matrix, residual = fit_linear_map(SINUSOIDS, offset)
    assert residual < 1e-4
    np.testing.assert_allclose(SINUSOIDS[:-offset] @ matrix.T, SINUSOIDS[offset:], atol=1e-3)
    assert fit_linear_map(RANDOM, offset)[1] > 0.9


def test_a_table_with_fewer_positions_than_dimensions_does_not_fit_itself() -> None:
    assert fit_linear_map(RANDOM[:12], 1)[1] > 0.9


def test_positions_show_each_table_its_map_and_its_measures() -> None:
    picture = draw_positions({"sinusoids": SINUSOIDS, "learned": RANDOM}, offset=2)
    panels = axes_of(picture)
    np.testing.assert_array_equal(image_of(panels["sinusoids"]), SINUSOIDS)
    np.testing.assert_array_equal(image_of(panels["learned"]), RANDOM)
    maps = [title for title in panels if title.startswith("map to PE(pos + 2), residual")]
    assert len(maps) == 2
    products = lines_of(panels["Dot product of PE(pos) and PE(pos + k)"])
    np.testing.assert_allclose(products["sinusoids"], dot_products(SINUSOIDS, 24))
    residuals = lines_of(panels["Residual of the linear map to PE(pos + k)"])
    assert max(residuals["sinusoids"]) < 1e-3
    assert min(residuals["learned"]) > 0.5
    assert len(axes_of(draw_positions({"sinusoids": SINUSOIDS}))) >= 4
