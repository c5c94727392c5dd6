"""The vectors between the layers of a model for one sentence pair (figure 1).

Shapes: S source positions, T target positions, D d_model. S and T include the end-of-sentence
token. The arrays contain no padding.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from transformer_jax.backend import standard_settings
from transformer_jax.inference.pairs import encode_pair, pad_pair
from transformer_jax.inference.translate import Translator
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.model.inspect import hidden_states

_jitted_states = jax.jit(hidden_states, static_argnums=0)


@dataclass(frozen=True, eq=False, repr=False)
class HiddenStates:
    """The vectors between the layers of both stacks, with the tokens of a sentence pair.

    Entry 0 of the first axis contains the embeddings with positional encodings (sections 3.4 and
    3.5). Entry i contains the output of layer i, after all of its sub-layers. A pre-norm model
    normalizes the last entry before using it.
    """

    encoder: Float[np.ndarray, "encoder_state S D"]
    """The vectors at the position of each of `source_tokens`."""
    decoder: Float[np.ndarray, "decoder_state T D"]
    """The vectors from which the decoder predicts each of `target_tokens`. At the same position,
    the decoder reads the previous target token."""
    source_tokens: tuple[str, ...]
    """The source tokens, ending in `<EOS>`. "▁" marks the start of a word, as in SentencePiece."""
    target_tokens: tuple[str, ...]
    """The tokens that the decoder predicts, ending in `<EOS>`."""

    def __repr__(self) -> str:
        shapes = " and ".join(str(x.shape) for x in (self.encoder, self.decoder))
        return f"HiddenStates({shapes})"


def compute_hidden_states(
    translator: Translator,
    params: Params,
    source: str,
    target: str | None = None,
    *,
    truncate: bool = False,
) -> HiddenStates:
    """Return the hidden states for a sentence pair, which `encode_pair` encodes."""
    model, vocabulary = translator.model, translator.vocabulary
    pair = encode_pair(translator, params, source, target, truncate=truncate)
    with standard_settings(model.config.dtype):
        states = jax.device_get(_jitted_states(model, params, *pad_pair(model, *pair)))
    encoder, decoder = (
        np.asarray(states[stack][:, 0, : len(tokens)], np.float32)
        for stack, tokens in zip(("encoder", "decoder"), pair, strict=True)
    )
    texts = (tuple(t.to_texts(tokens)) for t, tokens in zip(vocabulary, pair, strict=True))
    return HiddenStates(encoder, decoder, *texts)
