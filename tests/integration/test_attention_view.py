"""Test that a browser displays the page of attention weights correctly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import launch, playwright_api
from pictures import HOSTILE, make_maps

from transformer_jax.visualization.attention_html import render_page
from transformer_jax.visualization.attention_maps import AttentionMaps, printable
from transformer_jax.visualization.attention_views import Selection

# Chromium takes several seconds to start. Fast tests of the page are in `test_attention_html`.
pytestmark = pytest.mark.slow

MAPS = make_maps(layers=3, heads=2)
HOSTILE_MAPS = make_maps(layers=6, heads=8, queries=60, keys=60, hostile=True)
# The page stores weights as multiples of 1/255 and rounds opacities to four digits.
TOLERANCE = 0.5 / 255 + 1e-4
LINES = "lines => lines.map(x => [...['head', 'query', 'key'].map(k => +x.dataset[k]), \
+x.getAttribute('stroke-opacity')])"


class View:
    """A browser page, and a list of its console messages, errors, and requests."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.problems: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.problems.append(request.url))

    def open(self, maps: AttentionMaps, width: int = 1000, **selection: Any) -> None:
        """Write a page to disk and open it in the browser."""
        path = self.folder / "page.html"
        page = render_page(maps, Selection(**selection), source=HOSTILE[0], target=HOSTILE[1])
        path.write_text(page.html, "utf-8")
        self.page.set_viewport_size({"width": width, "height": 700})
        self.page.goto(path.as_uri())
        assert self.problems.pop(0) == path.as_uri()

    def token(self, side: str, position: int) -> Any:
        return self.page.locator(f".{side} .token").nth(position)

    def lines(self) -> dict[tuple[int, int, int], float]:
        """Return the opacity of each line, keyed by head, query, and key."""
        shown = self.page.eval_on_selector_all(".lines line", LINES)
        return {(int(h), int(q), int(k)): opacity for h, q, k, opacity in shown}

    def evaluate(self, script: str, argument: object = None) -> Any:
        return self.page.evaluate(script, argument)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Chromium refuses to run as root unless its sandbox is disabled.
    with playwright_api.sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def view(browser: Any, tmp_path: Path) -> Iterator[View]:
    page = browser.new_page()
    view = View(page, tmp_path)
    yield view
    page.close()
    assert view.problems == [], "the page printed an error or loaded something"


def assert_lines_are_weights(
    view: View, kind: str, layer: int, heads: tuple[int, ...] = (0, 1), query: int | None = None
) -> None:
    weights, lines = MAPS[kind].weights[layer], view.lines()
    queries = range(weights.shape[1]) if query is None else [query]
    expected = {
        (h, q, k): weights[h, q, k] for h in heads for q in queries for k in range(weights.shape[2])
    }
    assert set(lines) == {place for place, weight in expected.items() if weight >= 0.5 / 255}
    assert lines
    for place, opacity in lines.items():
        assert opacity == pytest.approx(expected[place], abs=TOLERANCE)


def test_the_page_shows_the_selection_and_switches_layer_and_kind(view: View) -> None:
    view.open(MAPS, kind="cross", layer=1)
    assert_lines_are_weights(view, "cross", 1)
    view.page.get_by_label("Layer").select_option(label="1 of 3")
    assert_lines_are_weights(view, "cross", 0)
    view.page.get_by_label("Attention").select_option("decoder")
    assert_lines_are_weights(view, "decoder", 0)
    for side in ("queries", "keys"):
        assert view.page.locator(f".{side} bdi").all_text_contents() == list(MAPS["decoder"].keys)
    view.page.get_by_role("button", name="head 1").click()
    assert_lines_are_weights(view, "decoder", 0, heads=(1,))
    assert view.page.locator("#caption").text_content() == "decoder, layer 1 of 3, head 2"


def test_a_kind_with_fewer_layers_shows_its_last_layer(view: View) -> None:
    view.open({**make_maps(layers=3), "cross": make_maps(layers=2)["cross"]}, kind="encoder")
    view.page.get_by_label("Attention").select_option("cross")
    assert view.page.locator("#caption").text_content() == "cross, layer 2 of 2, all heads"
    assert view.page.get_by_label("Layer").input_value() == "1"
    assert view.lines()


def test_a_token_is_selected_while_the_mouse_is_over_it_and_stays_after_a_click(view: View) -> None:
    view.open(MAPS, layer=2)
    view.token("queries", 3).hover()
    assert_lines_are_weights(view, "cross", 2, query=3)
    # The strips next to the keys show the same weights as the lines.
    strips = view.page.eval_on_selector_all(
        ".keys .strip", "strips => strips.map(s => [...s.children].map(x => +x.style.opacity))"
    )
    np.testing.assert_allclose(strips, MAPS["cross"].weights[2, :, 3].T, atol=TOLERANCE)
    best = int(MAPS["cross"].weights[2, 0, 3].argmax())
    readout = view.page.locator("#readout").inner_text()
    assert f"head 1: s{best} {MAPS['cross'].weights[2, 0, 3, best]:.2f}"[:-1] in readout
    view.page.mouse.move(5, 5)
    assert_lines_are_weights(view, "cross", 2)
    view.token("queries", 1).click()
    view.page.mouse.move(5, 5)
    assert_lines_are_weights(view, "cross", 2, query=1)
    view.page.keyboard.press("Escape")
    assert_lines_are_weights(view, "cross", 2)
    view.token("keys", 4).hover()
    assert {key for _, _, key in view.lines()} == {4}


@pytest.mark.parametrize("width", [1000, 390])
def test_the_labels_of_columns_are_aligned_with_their_tokens(view: View, width: int) -> None:
    view.open(MAPS, width)
    for number, (side, edge) in enumerate((("queries", "right"), ("keys", "left"))):
        label, token = (
            view.evaluate(
                "([selector, edge]) => { const range = document.createRange();"
                "range.selectNodeContents(document.querySelector(selector));"
                "return range.getBoundingClientRect()[edge]; }",
                [selector, edge],
            )
            for selector in (f".columns h3:nth-child({number + 1})", f".{side} bdi")
        )
        assert label == pytest.approx(token, abs=1)


def test_the_help_names_the_axes_of_heat_maps(view: View) -> None:
    view.open(MAPS, view="grid")
    expected = "The rows of a heat map are outputs, and its columns are sources."
    for name in ("grid", "alignment"):
        view.page.get_by_label("View").select_option(name)
        assert expected in view.page.locator("#help").inner_text()


def test_the_keyboard_reaches_controls_and_tokens(view: View) -> None:
    view.open(MAPS)
    for _ in range(3 + 2 + 1 + 1):
        view.page.keyboard.press("Tab")
    assert_lines_are_weights(view, "cross", 2, query=0)
    view.page.keyboard.press("ArrowDown")
    assert_lines_are_weights(view, "cross", 2, query=1)
    outline = view.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    view.page.keyboard.press("Enter")
    view.page.keyboard.press("End")
    assert_lines_are_weights(view, "cross", 2, query=1)
    view.page.keyboard.press("Escape")
    view.page.keyboard.press("ArrowRight")
    assert {key for _, _, key in view.lines()} == {4}


def test_the_grid_shows_the_weights_of_every_head_and_opens_them(view: View) -> None:
    view.open(MAPS, view="grid")
    alphas = view.page.eval_on_selector_all(
        ".grid canvas",
        "all => all.map(c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        ".filter((_, i) => i % 4 === 3))",
    )
    weights = MAPS["cross"].weights
    np.testing.assert_allclose(np.array(alphas) / 255, weights.reshape(6, -1), atol=TOLERANCE)
    view.page.get_by_role("button", name="layer 2, head 2").click()
    assert_lines_are_weights(view, "cross", 1, heads=(1,))


def test_the_alignment_highlights_the_selected_token_until_escape(view: View) -> None:
    view.open(MAPS, view="alignment", position=-1)
    assert view.page.locator(".alignment th.selected").all_inner_texts() == ["p4"]
    view.page.keyboard.press("Escape")
    assert view.page.locator(".alignment th.selected").count() == 0


def test_the_alignment_shows_the_mean_over_the_selected_heads(view: View) -> None:
    view.open(MAPS, view="alignment", layer=0)
    opacities = "cells => cells.map(cell => +cell.style.opacity)"
    shown = view.page.eval_on_selector_all(".alignment td i", opacities)
    caption = view.page.locator("#caption")
    assert caption.text_content() == "cross, layer 1 of 3, mean over all heads"
    mean = MAPS["cross"].weights[0].mean(0)
    np.testing.assert_allclose(shown, mean.ravel(), atol=TOLERANCE)
    view.page.locator(".alignment td[data-query='2'][data-key='1']").hover()
    text = view.page.locator("#readout").inner_text()
    assert text.startswith("p2 attends to s1: ")
    assert float(text.split()[-1]) == pytest.approx(mean[2, 1], abs=0.005 + TOLERANCE)
    view.page.get_by_role("button", name="head 2").click()
    shown = view.page.eval_on_selector_all(".alignment td i", opacities)
    np.testing.assert_allclose(shown, MAPS["cross"].weights[0, 0].ravel(), atol=TOLERANCE)
    assert caption.text_content() == "cross, layer 1 of 3, head 1"


@pytest.mark.parametrize("width", [1000, 390])
def test_hostile_tokens_are_text_and_fit_the_page(view: View, width: int) -> None:
    view.open(HOSTILE_MAPS, width)
    texts = view.page.locator(".queries bdi").all_text_contents()
    assert texts == list(HOSTILE_MAPS["cross"].queries)
    assert view.page.locator("#source").text_content() == printable(HOSTILE[0])
    assert view.evaluate("document.title") == "Attention weights"
    view.token("queries", 8).click()
    # No token is hidden, no token overlaps the lines, all rows have the same height, and nothing
    # overflows.
    boxes = view.page.eval_on_selector_all(
        ".token bdi", "all => all.map(x => x.getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    left, right = view.evaluate(
        "(b => [b.left, b.right])(document.querySelector('.lines').getBoundingClientRect())"
    )
    assert all(b > a and (b <= left or a >= right) for a, b in boxes)
    assert view.evaluate("document.querySelector('.queries').clientHeight") == 60 * 28
    for name in ("heads", "grid", "alignment"):
        view.page.get_by_label("View").select_option(name)
        assert view.evaluate("document.documentElement.scrollWidth") == width


def test_the_page_works_in_the_frame_of_a_notebook_and_follows_the_color_scheme(
    view: View, tmp_path: Path
) -> None:
    page = render_page(MAPS, Selection(view="grid"), source="a", target="b")
    (tmp_path / "notebook.html").write_text(page._repr_html_(), "utf-8")
    color = "getComputedStyle(document.body).backgroundColor"
    colors = set()
    for scheme in ("light", "dark"):
        view.page.emulate_media(color_scheme=scheme)
        view.page.goto((tmp_path / "notebook.html").as_uri())
        frame = view.page.frames[1]
        assert frame.locator(".grid canvas").count() == 6
        colors.add(frame.evaluate(color))
    assert len(colors) == 2
    # The browser requested only the notebook itself and its frame.
    assert {urlsplit(problem).scheme for problem in view.problems} <= {"file", "about"}
    view.problems.clear()
