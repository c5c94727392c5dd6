"""Attention without storing all of its weights, which saves memory and time on long sequences.

Both classes compute equation 1 and have the parameters of `MultiHeadAttention`. They do not store
weights, so they cannot record them; `inspect.attention_weights` computes them with full attention.
Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention, Positions
from transformer_jax.model.variants.blockwise_attention import blockwise_attention


def score_scale(config: ModelConfig) -> float:
    """Return the factor by which the config's score multiplies the dot product."""
    return config.d_k**-0.5 if config.attention_score == "scaled_dot_product" else 1.0


class BlockwiseAttention(MultiHeadAttention):
    """Computes attention block by block, on any device, with dropout: see `blockwise_attention`."""

    def attend_heads(
        self,
        query: Float[Array, "B T H K"],
        key: Float[Array, "B S H K"],
        value: Float[Array, "B S H V"],
        mask: Bool[Array, "#B #H #T S"],
        _positions: Positions,
        train: bool,
        /,
    ) -> Float[Array, "B T H V"]:
        """Return Attention(Q, K, V) of each head, up to rounding."""
        rng, rate = self.dropout.draw_key(train=train), self.dropout.rate
        scale = score_scale(self.config)
        return blockwise_attention(query, key, value, mask, scale=scale, rate=rate, rng=rng)


class CudnnAttention(MultiHeadAttention):
    """Runs cuDNN's flash attention on an NVIDIA GPU through `jax.nn.dot_product_attention`.

    The config enforces cuDNN's requirements: bfloat16, no dropout of weights, and d_k = d_v. Tests
    run without a GPU, so they run this class with JAX's own implementation.
    """

    def attend_heads(
        self,
        query: Float[Array, "B T H K"],
        key: Float[Array, "B S H K"],
        value: Float[Array, "B S H V"],
        mask: Bool[Array, "#B #H #T S"],
        _positions: Positions,
        _train: bool,
        /,
    ) -> Float[Array, "B T H V"]:
        """Return Attention(Q, K, V) of each head, up to rounding; dropout has rate 0."""
        # cuDNN's backward pass accepts only even numbers of masked queries and keys.
        num_queries, num_keys = query.shape[1], key.shape[1]
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)
        )
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], num_queries, num_keys))
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, num_queries % 2), (0, num_keys % 2)))
        heads = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=score_scale(self.config),
            implementation="cudnn",
        )
        return heads[:, :num_queries]
