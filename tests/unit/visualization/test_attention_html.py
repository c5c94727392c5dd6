"""Test the generated HTML. `integration/test_attention_view.py` tests it in a browser."""

import base64
import html
import json
import re
from typing import Any

import numpy as np
import pytest
from pictures import HOSTILE, make_maps

from transformer_jax.errors import UsageError
from transformer_jax.visualization.attention_figures import HEAD_COLORS
from transformer_jax.visualization.attention_html import (
    MAX_HEIGHT,
    STEPS,
    AttentionPage,
    render_page,
    to_json,
)
from transformer_jax.visualization.attention_maps import AttentionMaps, printable
from transformer_jax.visualization.attention_views import Selection

SCRIPT = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def render(maps: AttentionMaps, **selection: Any) -> AttentionPage:
    return render_page(maps, Selection(**selection), source=HOSTILE[0], target=HOSTILE[1])


def data_of(page: AttentionPage) -> dict[str, Any]:
    found = SCRIPT.search(page.html)
    assert found is not None
    return json.loads(found[1])


def test_the_page_contains_every_weight_to_half_a_step() -> None:
    maps = make_maps()
    data = data_of(render(maps, kind="decoder", layer=0, heads=[1], position=-1))
    for stored in data["maps"]:
        weights = maps[stored["kind"]].weights
        decoded = np.frombuffer(base64.b64decode(stored["weights"]), np.uint8) / 255
        np.testing.assert_allclose(decoded.reshape(weights.shape), weights, atol=0.5 / 255 + 1e-6)
        assert (stored["numLayers"], stored["numHeads"]) == weights.shape[:2]
    chosen = {"kind": "decoder", "view": "heads", "layer": 0, "heads": [1], "position": 4}
    assert data["selection"] == chosen


def test_hostile_tokens_do_not_become_markup() -> None:
    page = render(make_maps(queries=10, keys=10, hostile=True))
    data = data_of(page)
    assert data["maps"][2]["queries"] == list(map(printable, HOSTILE))
    assert (data["source"], data["target"]) == HOSTILE[:2]
    # The only two script elements contain the data and the program.
    assert page.html.count("<script") == page.html.count("</script") == 2
    assert "<img" not in page.html
    found = SCRIPT.search(page.html)
    assert found is not None
    assert not set("<>&\u2028") & set(found[1])
    assert json.loads(to_json(HOSTILE)) == list(HOSTILE)


def test_the_page_loads_nothing() -> None:
    page = render(make_maps()).html
    assert "default-src 'none'" in page
    urls = set(re.findall(r"https?://[^\"' )]*|url\(|@import|(?:src|href)=\"[^\"]*", page))
    # The two HTTP URLs are XML namespace names.
    assert urls == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml", 'href="data:,'}


def test_heads_have_the_colors_of_figures_and_as_many_colors_on_a_dark_background() -> None:
    page = render(make_maps()).html
    found = re.findall(r"--head-(\d+): (#[0-9a-f]{6});", page)
    size = len(HEAD_COLORS)
    assert [int(number) for number, _ in found] == [*range(size), *range(size)]
    assert tuple(color for _, color in found[:size]) == HEAD_COLORS
    assert len({color for _, color in found}) == 2 * size
    assert f"const NUM_COLORS = {size};" in page
    assert f"const STEPS = {STEPS};" in page


def test_a_page_of_the_base_model_and_60_tokens_takes_less_than_a_megabyte() -> None:
    page = render(make_maps(layers=6, heads=8, queries=60, keys=60, hostile=True))
    assert len(page.html.encode()) < 0.8e6


def test_a_notebook_shows_the_page_in_a_frame_that_contains_it() -> None:
    page = render(make_maps(queries=10, keys=10, hostile=True))
    frame = page._repr_html_()
    found = re.fullmatch(
        r'<iframe [^<>]*sandbox="allow-scripts"[^<>]*srcdoc="([^"]*)"></iframe>', frame
    )
    assert found is not None
    assert html.unescape(found[1]) == page.html
    assert len(repr(page)) < 100


def test_the_frame_is_higher_for_longer_sentences_up_to_a_limit() -> None:
    heights = [render(make_maps(queries=n, keys=3)).height for n in (1, 12, 60)]
    assert heights == sorted(set(heights))
    assert heights[-1] == MAX_HEIGHT


def test_a_selection_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match="layer 2 does not exist"):
        render(make_maps(), layer=2)
