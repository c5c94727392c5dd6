"""Attention from the decoder to the source, as in the models that the Transformer replaced.

This attention has a single head, and it projects queries and keys only for the additive score.
Shapes: B batch, T queries, S source positions, D d_model.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import masked_softmax, weighted_sum
from transformer_jax.model.build import SCORES
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import Dense


class Source(NamedTuple):
    """The encoder's output, prepared for attention."""

    keys: Float[Array, "B S 1 D"]
    values: Float[Array, "B S 1 D"]
    mask: Bool[Array, "B 1 1 S"]
    """True where attention is allowed."""


class SourceAttention(nn.Module):
    """A module that averages the source vectors, with weights based on `model.attention_score`.

    The additive score is v^T tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2). The other
    scores compare the queries and keys without projecting them (Luong et al. 2015, section 3.1).
    The module records the attention weights in Flax's "intermediates" collection.
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        make_score = SCORES[c.attention_score]
        width = c.d_model
        score_config = ModelConfig(d_model=width, num_heads=1, d_k=width, positions="none")
        self.score = make_score(score_config)
        if c.attention_score == "additive":
            self.query = Dense((c.d_model,), c.dtype, use_bias=False)
            self.key = Dense((c.d_model,), c.dtype, use_bias=False)
        else:
            self.query = self.key = lambda x: x
        self.dropout = Dropout(c.attention_dropout)

    def prepare(
        self,
        keys: Float[Array, "B S D"],
        values: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 1 S"],
    ) -> Source:
        """Project the keys for the additive score, once for all queries."""
        return Source(self.key(keys)[:, :, None], values[:, :, None], mask)

    def __call__(
        self, query: Float[Array, "B T D"], source: Source, *, train: bool = False
    ) -> Float[Array, "B T D"]:
        scores = self.score(self.query(query)[:, :, None], source.keys)
        weights = masked_softmax(scores, source.mask)
        self.sow("intermediates", "weights", weights)
        weights = self.dropout(weights, train=train)
        return jnp.squeeze(weighted_sum(weights, source.values), axis=2)
