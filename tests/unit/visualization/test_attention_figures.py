import re
import warnings
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from pictures import HOSTILE, axes_of, image_of, lines_of, make_maps

from transformer_jax.errors import UsageError
from transformer_jax.visualization.attention_figures import MIN_WEIGHT, draw_attention, draw_heads
from transformer_jax.visualization.attention_views import Selection

MAPS = make_maps()


def draw(**selection: Any) -> Figure:
    return draw_attention(MAPS, Selection(**selection)).figure


def opacities(figure: Figure) -> np.ndarray:
    """Return the opacity of each line, grouped by head."""
    [axes] = figure.axes
    lines = [x for x in axes.collections if isinstance(x, LineCollection)]
    return np.concatenate([np.asarray(x.get_colors())[:, 3] for x in lines])


def test_the_opacity_of_each_line_is_its_weight() -> None:
    weights = MAPS["cross"].weights[0].ravel()
    np.testing.assert_allclose(opacities(draw(layer=0)), weights[weights >= MIN_WEIGHT])


def test_a_selected_token_and_head_have_only_their_lines() -> None:
    weights = MAPS["decoder"].weights[1, 2, 3]
    figure = draw(kind="decoder", heads=[2], position=3)
    np.testing.assert_allclose(opacities(figure), weights[weights >= MIN_WEIGHT])
    assert [x.get_text() for x in figure.axes[0].texts if x.get_fontweight() == "bold"] == ["r3"]


def test_the_grid_shows_every_layer_and_head_on_one_scale() -> None:
    images = [image for axes in draw(view="grid").axes for image in axes.get_images()]
    shown = np.stack([np.asarray(image.get_array()) for image in images]).reshape(2, 3, 5, 6)
    np.testing.assert_array_equal(shown, MAPS["cross"].weights)
    assert {image.get_clim() for image in images} == {(0.0, 1.0)}


def test_the_alignment_is_the_mean_over_the_selected_heads() -> None:
    figure = draw(view="alignment", heads=[0, 2])
    axes = figure.axes[0]
    expected = MAPS["cross"].weights[1, [0, 2]].mean(0)
    np.testing.assert_allclose(np.asarray(axes.get_images()[0].get_array()), expected)
    assert [x.get_text() for x in axes.get_xticklabels()] == list(MAPS["cross"].keys)
    assert [x.get_text() for x in axes.get_yticklabels()] == list(MAPS["cross"].queries)
    assert figure.get_suptitle() == "Cross, layer 2 of 2, heads 1, 3, mean over heads"


def test_layers_and_heads_are_numbered_from_one() -> None:
    svg = draw_attention(MAPS, Selection(layer=0, heads=[1])).svg
    assert "Cross, layer 1 of 2, head 2<" in svg
    assert ">head 2<" in svg


@pytest.mark.parametrize("view", ["heads", "alignment"])
def test_hostile_tokens_are_text(view: str) -> None:
    maps = make_maps(layers=1, heads=1, queries=10, keys=10, hostile=True)
    svg = draw_attention(maps, Selection(view=view)).svg
    texts = {text for text in ET.fromstring(svg).itertext() if text.strip()}  # noqa: S314
    for token in (*HOSTILE[2:4], HOSTILE[5], HOSTILE[9]):
        assert token in texts
    for start in ("$x_1$", r"\u202eright-to-left", "</script><script>"):
        assert any(text.startswith(start) for text in texts)
    assert not re.search("<script|<img", svg)


def test_the_same_weights_yield_the_same_bytes() -> None:
    first, second = (draw_attention(MAPS, Selection()) for _ in range(2))
    assert first.svg == second.svg
    assert first._repr_png_() == second._repr_png_()


def test_tokens_stay_inside_the_figure_and_outside_the_lines() -> None:
    maps = make_maps(layers=1, heads=1, queries=9, keys=9, hostile=True)
    figure = draw_attention(maps, Selection()).figure
    lines = figure.axes[0].get_window_extent()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    width = figure.get_window_extent().width
    assert len(boxes) == 20
    assert all(0 <= box.x0 < box.x1 <= width for box in boxes)
    assert all(box.x1 <= lines.x0 or box.x0 >= lines.x1 for box in boxes)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_the_legend_stays_inside_the_figure_and_below_the_tokens(heads: int) -> None:
    figure = draw_attention(make_maps(layers=1, heads=heads), Selection()).figure
    [legend] = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.get_window_extent().width
    assert 0 <= box.y0 < box.y1 <= min(x.get_window_extent().y0 for x in figure.axes[0].texts)


@pytest.mark.parametrize("view", ["heads", "alignment"])
def test_a_long_title_stays_inside_the_figure_and_above_everything_else(view: str) -> None:
    maps = make_maps(layers=1, heads=16)
    figure = draw_attention(maps, Selection(view=view, heads=range(15))).figure
    figure.draw_without_rendering()
    [title] = figure.texts
    box = title.get_window_extent()
    assert " ".join(title.get_text().split()).startswith("Cross, layer 1 of 1, heads 1, 2, 3, 4, 5")
    assert 0 <= box.x0 < box.x1 <= figure.get_window_extent().width
    assert all(x.get_window_extent().y1 <= box.y0 for x in figure.axes[0].texts)
    title = figure.axes[0].get_tightbbox()
    assert title is not None
    assert title.y1 <= box.y0


def test_a_layer_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match="layer -3 does not exist"):
        draw(layer=-3)


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
