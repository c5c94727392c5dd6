"""Random attention weights to draw, and readers for figures and HTML pages."""

from html.parser import HTMLParser

import numpy as np
from matplotlib.axes import Axes
from oracles import floats

from transformer_jax.visualization.attention_maps import AttentionMap
from transformer_jax.visualization.style import Picture

HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "\"'&amp;`",
    "مرحبا",
    "\u202eright-to-left override",
    "e\u0301\u0308\u0323",
    "👩\u200d👩\u200d👧",
    "$x_1$ \\ ]]> --> \x00\x1b\u2028",
    "a" * 80,
    "▁word",
)


def make_maps(
    *, layers: int = 2, heads: int = 3, queries: int = 5, keys: int = 6, hostile: bool = False
) -> dict[str, AttentionMap]:
    """Return random attention maps whose rows sum to 1.

    Tokens are distinct unless `hostile` is true.
    """
    rng = np.random.default_rng(0)

    def draw(*lengths: int) -> np.ndarray:
        weights = np.exp(rng.normal(0.0, 2.0, (layers, heads, *lengths)))
        return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

    def name(prefix: str, count: int) -> tuple[str, ...]:
        if hostile:
            return tuple(HOSTILE[i % len(HOSTILE)] for i in range(count))
        return tuple(f"{prefix}{i}" for i in range(count))

    source, read, predicted = name("s", keys), name("r", queries), name("p", queries)
    return {
        "encoder": AttentionMap("encoder", draw(keys, keys), source, "source", source, "source"),
        "decoder": AttentionMap("decoder", draw(queries, queries), read, "input", read, "input"),
        "cross": AttentionMap("cross", draw(queries, keys), predicted, "output", source, "source"),
    }


def axes_of(picture: Picture) -> dict[str, Axes]:
    """Return a figure's panels, keyed by title, or by y-axis label if there is no title."""
    return {axes.get_title() or axes.get_ylabel(): axes for axes in picture.figure.axes}


def lines_of(axes: Axes) -> dict[str, list[float]]:
    return {str(line.get_label()): floats(line.get_ydata()).tolist() for line in axes.lines}


def image_of(axes: Axes) -> np.ndarray:
    [image] = axes.images
    return np.asarray(image.get_array())


class Page(HTMLParser):
    """A parser that collects a page's tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = list[str](), ""
        self.feed(page)

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],  # noqa: ARG002 - the base class passes it.
    ) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data
