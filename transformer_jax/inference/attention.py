"""The attention weights of one sentence pair, for analysis and visualization (figures 3 to 5).

Shapes: S source positions, T target positions. S and T include the end-of-sentence token. The
arrays contain no padding.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from transformer_jax.backend import standard_settings
from transformer_jax.config.validation import checked
from transformer_jax.data.tokenizer import NAMES
from transformer_jax.errors import UsageError
from transformer_jax.files import parse_path
from transformer_jax.inference.pairs import encode_pair, pad_pair
from transformer_jax.inference.translate import Translator
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.model.inspect import attention_weights
from transformer_jax.visualization.attention_html import AttentionPage, render_page
from transformer_jax.visualization.attention_maps import AttentionMap
from transformer_jax.visualization.attention_views import Selection
from transformer_jax.visualization.files import ATTENTION_SUFFIXES, check_suffix, write_file

if TYPE_CHECKING:
    from transformer_jax.visualization.style import Picture

_jitted_weights = jax.jit(attention_weights, static_argnums=0)


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """The attention weights and tokens for a source sentence and its translation.

    The rnn and conv architectures have no self-attention, so the arrays `encoder` and `decoder`
    have no layers.

    Layer, head, and position indices work as in Python: they start at 0, and negative indices
    count from the end. Figures number layers and heads from 1, as the paper does, so `layer=4`
    appears as "layer 5 of 6".
    """

    encoder: Float[np.ndarray, "layer head S S"]
    """Self-attention in the encoder. The weights sum to 1 over the last axis."""
    decoder: Float[np.ndarray, "decoder_layer head T T"]
    """Self-attention in the decoder: `decoder_input_tokens` attend to no later tokens."""
    cross: Float[np.ndarray, "cross_layer head T S"]
    """Attention from the decoder to the encoder as the decoder predicts each of `target_tokens`."""
    source_tokens: tuple[str, ...]
    """The source tokens, ending in `<EOS>`. "▁" marks the start of a word, as in SentencePiece."""
    target_tokens: tuple[str, ...]
    """The tokens that the decoder predicts, ending in `<EOS>`."""
    source: str
    target: str
    decoder_start: str = "<BOS>"

    def __repr__(self) -> str:
        layers, heads, *lengths = self.cross.shape
        return f"Attention({layers} layers, {heads} heads, {lengths[1]} -> {lengths[0]} tokens)"

    @property
    def decoder_input_tokens(self) -> tuple[str, ...]:
        """The tokens the decoder reads: `decoder_start`, then all target tokens except the last."""
        return (self.decoder_start, *self.target_tokens[:-1])

    @functools.cached_property
    def maps(self) -> dict[str, AttentionMap]:
        """The weights for each kind of attention, with tokens and labels for both axes."""
        source = (self.source_tokens, "source token")
        read = (self.decoder_input_tokens, "decoder input token")
        predicted = (self.target_tokens, "predicted token")
        maps = {
            "encoder": AttentionMap("encoder self-attention", self.encoder, *source, *source),
            "decoder": AttentionMap("decoder self-attention", self.decoder, *read, *read),
            "cross": AttentionMap("cross-attention", self.cross, *predicted, *source),
        }
        return {kind: of_kind for kind, of_kind in maps.items() if len(of_kind.weights)}

    def show(self, **selection: Any) -> AttentionPage:  # noqa: ANN401 (the fields in `Selection`)
        """Return an interactive page for display in a notebook.

        `selection` contains fields in `Selection`: `kind`, `layer`, `view`, `heads`, and
        `position`. By default, the page first shows the last layer of cross-attention.

        Raises:
            UsageError: the selection is invalid.
        """
        chosen = checked(Selection)(**selection)
        return render_page(self.maps, chosen, source=self.source, target=self.target)

    def draw(self, **selection: Any) -> "Picture":  # noqa: ANN401 (as for `show`)
        """Return a figure of the selected weights; `selection` is the same as for `show`."""
        # Import matplotlib only for figures, because the HTML page does not need it.
        from transformer_jax.visualization.attention_figures import draw_attention

        return draw_attention(self.maps, checked(Selection)(**selection))

    def save(self, path: str | Path, **selection: Any) -> None:  # noqa: ANN401 (as for `show`)
        """Save the page (.html) or a figure of the selection (.svg, .png).

        `selection` is the same as for `show`. An existing file is overwritten. A page contains all
        weights; a figure contains only the selected weights.

        Raises:
            UsageError: the file suffix is not supported, or the selection is invalid.
            StorageError: the file cannot be written.
        """
        path = parse_path(path)
        if check_suffix(path, ATTENTION_SUFFIXES) == ".html":
            write_file(path, self.show(**selection).html.encode())
        else:
            self.draw(**selection).save(path)


def compute_attention(
    translator: Translator,
    params: Params,
    source: str,
    target: str | None = None,
    *,
    truncate: bool = False,
) -> Attention:
    """Return the attention weights for a sentence pair, which `encode_pair` encodes."""
    source_ids, target_ids = encode_pair(translator, params, source, target, truncate=truncate)
    vocabulary = translator.vocabulary
    weights = _compute_weights(translator, params, source_ids, target_ids)
    # If the model computes NaN, a beam search finds no hypothesis, so the target has no tokens.
    if not (target_ids and all(np.isfinite(x).all() for x in weights.values())):
        raise UsageError("the attention weights are not finite: load another checkpoint")
    return Attention(
        **weights,
        source_tokens=tuple(vocabulary.source.to_texts(source_ids)),
        target_tokens=tuple(vocabulary.target.to_texts(target_ids)),
        source=vocabulary.source.decode([source_ids])[0],
        target=vocabulary.target.decode([target_ids])[0],
        decoder_start=NAMES[translator.model.config.decoder_start_id],
    )


def _compute_weights(
    translator: Translator, params: Params, source: list[int], target: list[int]
) -> dict[str, np.ndarray]:
    """Return the weights for one sentence pair, with the padding removed."""
    rows = pad_pair(translator.model, source, target)
    with standard_settings(translator.model.config.dtype):
        weights = jax.device_get(_jitted_weights(translator.model, params, *rows))
    if "cross" not in weights:
        raise UsageError("this model does not attend to the source")
    lengths = {"encoder": (len(source),) * 2, "decoder": (len(target),) * 2}
    lengths["cross"] = (len(target), len(source))
    return {
        kind: np.asarray(weights[kind][:, 0, :, :queries, :keys], np.float32)
        if kind in weights
        else np.zeros((0, 1, queries, keys), np.float32)
        for kind, (queries, keys) in lengths.items()
    }
