"""Attention scores with learned parameters, as alternatives to the dot product.

Both scores differ from the paper, which uses a scaled dot product. Both scores take projected
queries and keys, so decoding with a cache projects the encoder's output only once.
Shapes: B batch, T queries, S keys, H heads, G heads of keys, K d_k.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.model.attention import dot_product, repeat_heads
from transformer_jax.model.operations import normal, sum_dtype


class General(nn.Module):
    """The score q^T W k ("general" in Luong et al. 2015), with a Glorot-initialized W per head."""

    @nn.compact
    def __call__(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S G K"]
    ) -> Float[Array, "B H T S"]:
        _, _, heads, width = query.shape
        init = nn.initializers.xavier_uniform(batch_axis=0)
        matrix = self.param("matrix", init, (heads, width, width))
        query = jnp.einsum("bthk,hkj->bthj", query, matrix.astype(query.dtype))
        return dot_product(query, key)


class Additive(nn.Module):
    """The score v^T tanh(q + k), with one v for each head (Bahdanau et al. 2015).

    The query and key projections correspond to W and U in that paper. The elements of v are
    initialized from N(0, 1/d_k).
    """

    @nn.compact
    def __call__(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S G K"]
    ) -> Float[Array, "B H T S"]:
        _, _, heads, width = query.shape
        vector = self.param("vector", normal(width**-0.5), (heads, width))
        return additive(query, repeat_heads(key, heads), vector)


# Recompute tanh in the backward pass, because its result, [B, H, T, S, K], is the largest array.
@jax.checkpoint
def additive(
    query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], vector: Float[Array, "H K"]
) -> Float[Array, "B H T S"]:
    """Return v^T tanh(q + k) for each query and key, in float32 or higher precision."""
    query, key = (jnp.moveaxis(x.astype(sum_dtype(x)), 2, 1) for x in (query, key))
    hidden = jnp.tanh(query[:, :, :, None] + key[:, :, None])
    return jnp.sum(hidden * vector[None, :, None, None], axis=-1)
