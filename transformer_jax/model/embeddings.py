"""The embeddings and the linear layer before the softmax, which share one matrix (section 3.4).

Shapes: B batch, T positions, D d_model, N vocab_size.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.operations import matmul, multiply_to_float32, normal


class Embedding(nn.Module):
    """A matrix that embeds tokens, maps the decoder's output to logits, or, if tied, does both.

    The paper does not specify the initializer. This class uses N(0, 1/d_model), so that logits have
    variance one, and embeddings times sqrt(d_model) are on the same scale as the sinusoids.
    """

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        d_model = self.config.d_model
        self.table = self.param("table", normal(d_model**-0.5), (self.vocab_size, d_model))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look up the tokens' vectors and multiply them by sqrt(d_model)."""
        dtype = self.config.dtype
        return self.table[tokens].astype(dtype) * jnp.asarray(self.config.d_model**0.5, dtype)

    def logits(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T N"]:
        """Return the dot product of each vector in x with every token vector.

        The logits are in float32 or higher precision, except in training with
        `model.logits_dtype` bfloat16.
        """
        dtype = self.config.dtype
        x, table = x.astype(dtype), self.table.astype(dtype).T
        if train and self.config.logits_dtype == "bfloat16":
            return matmul(x, table).astype(jnp.bfloat16)
        return multiply_to_float32(matmul, x, table)
