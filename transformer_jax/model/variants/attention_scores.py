"""Scores with parameters: ways to compare queries and keys that the dot product replaced.

Section 3.2.1 names two kinds, multiplicative and additive. The query and the key are projected
for each head before they come here, the memory once for all steps of a translation.
Shapes: B batch, T queries, S keys, H heads, K d_k.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig


class General(nn.Module):
    """q^T W k, with a W for each head ("general" of Luong et al. 2015).

    Differs from the paper, which has no W, and scales. W begins Glorot-uniform.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"]
    ) -> Float[Array, "B H T S"]:
        c = self.config
        init = nn.initializers.xavier_uniform(batch_axis=0)
        matrix = self.param("matrix", init, (c.num_heads, c.d_k, c.d_k))
        query = jnp.einsum("bthk,hkj->bthj", query, matrix.astype(query.dtype))
        # In float32 as the dot product is.
        return jnp.einsum("bthj,bshj->bhts", query, key, preferred_element_type=jnp.float32)


class Additive(nn.Module):
    """v^T tanh(q + k), with a v for each head (Bahdanau et al. 2015).

    Theirs is v^T tanh(W s + U h): the projections of queries and keys are W and U, so that U h
    is computed once. Differs from the paper. v begins as N(0, 1/d_k).
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"]
    ) -> Float[Array, "B H T S"]:
        c = self.config
        init = nn.initializers.normal(c.d_k**-0.5)
        return additive(query, key, self.param("vector", init, (c.num_heads, c.d_k)))


# The backward pass computes tanh again: kept, [B, H, T, S, K] would be the largest of all arrays.
@jax.checkpoint
def additive(
    query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], vector: Float[Array, "H K"]
) -> Float[Array, "B H T S"]:
    """Return v^T tanh(q + k) for each query and key, in float32 whatever the compute dtype."""
    query, key = (jnp.moveaxis(x.astype(jnp.float32), 2, 1) for x in (query, key))
    hidden = jnp.tanh(query[:, :, :, None] + key[:, :, None])
    return jnp.sum(hidden * vector[:, None, None], axis=-1)
