"""Embeddings and softmax, which share one matrix (section 3.4).

Shapes: B batch, T positions, D d_model, N vocab_size.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import matrix_product
from transformer_jax.model.positions import PAST_TABLE, POSITIONS


class SharedEmbedding(nn.Module):
    """One matrix for source pieces, target pieces and the layer before the softmax.

    Where `model.tie_embeddings` or vocabularies part them, each has one like it.
    Drawn from N(0, 1/d_model), on which the paper is silent: so embeddings times sqrt(d_model)
    have the size of the sinusoids, and logits start with variance one.
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        d_model = self.config.d_model
        init = nn.initializers.normal(d_model**-0.5)
        self.table = self.param("table", init, (self.vocab_size, d_model))

    def embed(self, pieces: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look pieces up and multiply by sqrt(d_model)."""
        dtype = self.config.dtype
        return self.table[pieces].astype(dtype) * jnp.asarray(self.config.d_model**0.5, dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """Compare with every piece, in float32 sums."""
        table = self.table.astype(x.dtype)
        return matrix_product(x, table.T, preferred_element_type=jnp.float32)


class AddPositions(nn.Module):
    """Add positions to embeddings, then drop out (sections 3.5 and 5.4); one for each stack."""

    config: ModelConfig
    length: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, " T"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        c = self.config
        encode = POSITIONS[c.positions]
        past = PAST_TABLE[c.out_of_range_positions]
        told = encode(self, positions, length=self.length, past=past, d_model=c.d_model)
        x = x + told.astype(x.dtype)
        return Dropout(c.dropout)(x, train=train)
