"""An interactive page of attention weights, as a single self-contained HTML file.

The page stores each weight w as the 8-bit integer round(255 w), so the error is at most 0.002. With
6 layers of 8 heads, the attention weights for 60 tokens take up 0.7 MB. A content security policy
prevents the page from loading any other resource.
"""

import base64
import html
import json
from dataclasses import asdict, dataclass
from importlib import resources

import numpy as np

from transformer_jax.files import JsonObject
from transformer_jax.visualization.attention_maps import AttentionMap, AttentionMaps, select
from transformer_jax.visualization.attention_views import Selection
from transformer_jax.visualization.text import printable

# The page stores weights from 0 to 1 as integers from 0 to this value.
STEPS = 255
# The scripts share one scope, and the last script initializes the page.
SCRIPTS = ("data.js", "heads.js", "heat_maps.js", "controls.js")
# Heights in pixels: the minimum and maximum height of the frame in a notebook, the height of a row
# of tokens, and the height of everything else.
MIN_HEIGHT, MAX_HEIGHT, ROW_HEIGHT, OTHER_HEIGHT = 480, 1000, 28, 420


@dataclass(frozen=True, repr=False)
class AttentionPage:
    """An HTML page that a notebook displays in a frame."""

    html: str
    height: int
    """The height of the frame in a notebook, in pixels."""

    def __repr__(self) -> str:
        return f"AttentionPage({len(self.html):,} characters of HTML, which a notebook displays)"

    def _repr_html_(self) -> str:
        # Scripts in the sandboxed frame can neither read nor change the notebook.
        return (
            f'<iframe title="Attention weights" sandbox="allow-scripts" '
            f'style="width:100%;height:{self.height}px;border:0" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def render_page(
    maps: AttentionMaps, selection: Selection, *, source: str, target: str
) -> AttentionPage:
    """Return a page of all weights that first shows the selection. The sentences are its title."""
    chosen, indices = select(maps, selection)
    data = {
        "source": printable(source),
        "target": printable(target),
        "maps": [{"kind": kind, **_describe(map_)} for kind, map_ in maps.items()],
        "selection": {"kind": selection.kind, "view": selection.view, **asdict(indices)},
    }
    page = _read("page.html")
    # Insert the data last, so that no text in it is mistaken for a placeholder.
    for name, content in (
        ("STYLE", _read("style.css")),
        ("SCRIPT", "\n".join(map(_read, SCRIPTS))),
        ("DATA", to_json(data)),
    ):
        page = page.replace(f"/*{name}*/", content)
    rows = max(len(chosen.queries), len(chosen.keys))
    height = min(max(MIN_HEIGHT, rows * ROW_HEIGHT + OTHER_HEIGHT), MAX_HEIGHT)
    return AttentionPage(page, height)


def to_json(data: object) -> str:
    """Return ASCII JSON, escaped so that an HTML parser cannot mistake it for markup."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})


def _describe(map_: AttentionMap) -> JsonObject:
    quantized = np.rint(map_.weights * STEPS).astype(np.uint8)
    return {
        "label": map_.label,
        "queryLabel": map_.query_label,
        "keyLabel": map_.key_label,
        "queries": map_.queries,
        "keys": map_.keys,
        "numLayers": map_.weights.shape[0],
        "numHeads": map_.weights.shape[1],
        "weights": base64.b64encode(quantized.tobytes()).decode(),
    }


def _read(name: str) -> str:
    folder = resources.files("transformer_jax.visualization") / "attention_page"
    return (folder / name).read_text("utf-8")
