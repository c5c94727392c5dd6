"""Attention that saves memory and time on long sequences by not storing all weights at once.

Both classes implement equation 1 with the parameters of `MultiHeadAttention` but do not record the
attention weights.
Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import Heads, MultiHeadAttention, repeat_heads
from transformer_jax.model.variants.blockwise_attention import Inputs, blockwise_attention


def score_scale(config: ModelConfig) -> float:
    """Return the factor by which the configured score scales the dot product."""
    return config.d_k**-0.5 if config.attention_score == "scaled_dot_product" else 1.0


class BlockwiseAttention(MultiHeadAttention):
    """Attention computed block by block on any device, with dropout (see `blockwise_attention`)."""

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        query, key, value, mask, _ = heads
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
        shape = (len(query), query.shape[2], query.shape[1], key.shape[1])
        rng, scale = self.dropout.draw_key(shape, train=train), score_scale(self.config)
        rate = None if rng is None else jnp.asarray(self.dropout.rate, float)
        return blockwise_attention(Inputs(query, key, value), mask, rng, rate, scale)


class CudnnAttention(MultiHeadAttention):
    """cuDNN's flash attention on an NVIDIA GPU, called through `jax.nn.dot_product_attention`.

    The config enforces cuDNN's requirements, such as bfloat16 and no attention dropout.
    """

    def attend_heads(self, heads: Heads, _train: bool, /) -> Float[Array, "B T H V"]:
        # With a mask, cuDNN's backward pass requires even numbers of queries and keys.
        query, key, value, mask, _ = heads
        num_queries, num_keys = query.shape[1], key.shape[1]
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)
        )
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], num_queries, num_keys))
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, num_queries % 2), (0, num_keys % 2)))
        scale = score_scale(self.config)
        output = jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=scale, implementation="cudnn"
        )
        return output[:, :num_queries]
