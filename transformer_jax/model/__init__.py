"""The paper's architecture and loss (sections 3 and 5.4), as pure functions of the parameters.

The code adds missing axes explicitly before it combines arrays of different ranks, because the
tests set `jax_numpy_rank_promotion` to "raise".
"""

from typing import TYPE_CHECKING

from transformer_jax.exports import lazy_exports

if TYPE_CHECKING:
    from transformer_jax.model.attention import (
        Heads,
        MultiHeadAttention,
        dot_product,
        masked_softmax,
        repeat_heads,
        scaled_dot_product,
        weighted_sum,
    )
    from transformer_jax.model.build import PositionScheme, choose_components
    from transformer_jax.model.dropout import Dropout
    from transformer_jax.model.encoder_decoder import EncoderDecoder, init_params, make_rng
    from transformer_jax.model.inspect import attention_weights, parameter_counts
    from transformer_jax.model.layers import FeedForward, layer_norm
    from transformer_jax.model.linear import Dense
    from transformer_jax.model.losses import Loss, cross_entropy
    from transformer_jax.model.masks import causal_mask, source_mask
    from transformer_jax.model.positions import AddPositions, sinusoid
    from transformer_jax.model.variants.sub_layers import AddNothing

__all__ = [
    "AddNothing",
    "AddPositions",
    "Dense",
    "Dropout",
    "EncoderDecoder",
    "FeedForward",
    "Heads",
    "Loss",
    "MultiHeadAttention",
    "PositionScheme",
    "attention_weights",
    "causal_mask",
    "choose_components",
    "cross_entropy",
    "dot_product",
    "init_params",
    "layer_norm",
    "make_rng",
    "masked_softmax",
    "parameter_counts",
    "repeat_heads",
    "scaled_dot_product",
    "sinusoid",
    "source_mask",
    "weighted_sum",
]

__getattr__ = lazy_exports(__name__)
