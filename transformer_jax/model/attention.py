"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D d_model, H heads, G heads of keys and values (H in the paper),
K d_k, V d_v. Each head of keys and values serves H / G consecutive heads of queries. Masks are
boolean arrays that are True where attention is allowed.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import Dense
from transformer_jax.model.operations import multiply_to_float32, sum_dtype

Score = Callable[[Float[Array, "B T H K"], Float[Array, "B S G K"]], Float[Array, "B H T S"]]
"""A function that scores how well each query matches each key, in float32 or higher precision."""

MakeScore = Callable[[ModelConfig], Score]
"""A function that returns the score function for a config. A score function with parameters is a
Flax module."""


class Positions(NamedTuple):
    """The query and key positions within their sentences, counted from 0.

    Only variants use these positions, because the paper adds positional encodings to the
    embeddings.
    """

    queries: Int[Array, " T"]
    keys: Int[Array, " S"]


class Heads(NamedTuple):
    """The inputs to attention in all heads: projections, a mask, and positions.

    A variant of `MultiHeadAttention.attend_heads` can replace individual fields.
    """

    query: Float[Array, "B T H K"]
    key: Float[Array, "B S G K"]
    value: Float[Array, "B S G V"]
    mask: Bool[Array, "#B #H #T S"]
    positions: Positions


def dot_product(
    query: Float[Array, "B T H K"], key: Float[Array, "B S G K"]
) -> Float[Array, "B H T S"]:
    """Score each query against each key with their dot product, q k.

    The paper scales this score; see `scaled_dot_product`.
    """
    batch, length, heads, width = query.shape
    key_heads, repeats = key.shape[2], heads // key.shape[2]
    # Do not repeat the keys: merge the heads that share them into one head with more queries.
    query = jnp.moveaxis(query.reshape(batch, length, key_heads, repeats, width), 3, 1)
    query = query.reshape(batch, repeats * length, key_heads, width)
    # Keep at least float32 precision, because bfloat16 would round large scores.
    multiply = partial(jnp.einsum, "bthk,bshk->bhts")
    return multiply_to_float32(multiply, query, key).reshape(batch, heads, length, key.shape[1])


def scaled_dot_product(
    query: Float[Array, "B T H K"], key: Float[Array, "B S G K"]
) -> Float[Array, "B H T S"]:
    """Score each query against each key with q k / sqrt(d_k).

    Without the scaling, the variance of the scores would grow with d_k, and large scores would push
    the softmax into regions with small gradients (section 3.2.1).
    """
    return dot_product(query, key) * query.shape[-1] ** -0.5


def masked_softmax(
    scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"]
) -> Float[Array, "B H T S"]:
    """Convert scores to weights that sum to one over the keys (the softmax in equation 1).

    The paper masks with negative infinity. This function uses the lowest float32 value, so that a
    query whose keys are all masked, as in an empty row, gets uniform weights instead of NaN.
    """
    # Sums in bfloat16 would lose small weights. Most scores already have at least this precision.
    scores = scores.astype(sum_dtype(scores))
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))


def weighted_sum(
    weights: Float[Array, "B H T S"], value: Float[Array, "B S G V"]
) -> Float[Array, "B T H V"]:
    """Return the weighted averages of the values (equation 1)."""
    batch, heads, length, num_keys = weights.shape
    _, _, value_heads, width = value.shape
    # Do not repeat the values: merge the heads that share them into one head with more queries.
    shape = batch, value_heads, heads // value_heads * length, num_keys
    weights = weights.astype(value.dtype).reshape(shape)
    # "bhtv" is the axis order of the matrix product. For "bthv", `einsum` would swap the operands.
    average = jnp.einsum("bhts,bshv->bhtv", weights, value)
    return average.reshape(batch, heads, length, width).swapaxes(1, 2)


def repeat_heads(x: Float[Array, "B S G K"], num_heads: int) -> Float[Array, "B S H K"]:
    """Repeat each head of keys or values for the heads of queries that share it."""
    return jnp.repeat(x, num_heads // x.shape[2], axis=2)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    By default, as in the paper, the score is `scaled_dot_product`, the projections have no biases,
    queries and keys are not normalized, each head has its own keys and values, and there is no
    dropout on the weights. Variants override `attend_heads`. The module records the
    attention weights in Flax's "intermediates" collection.
    """

    config: ModelConfig
    make_score: MakeScore

    def setup(self) -> None:
        c = self.config
        dtype, use_bias = c.dtype, c.attention_bias
        self.query = Dense((c.num_heads, c.d_k), dtype, use_bias=use_bias)
        self.key = Dense((c.key_value_heads, c.d_k), dtype, use_bias=use_bias)
        self.value = Dense((c.key_value_heads, c.d_v), dtype, use_bias=use_bias)
        self.output = Dense((c.d_model,), dtype, num_input_axes=2, use_bias=use_bias)
        self.score = self.make_score(c)
        self.dropout = Dropout(c.attention_dropout)
        if c.query_key_norm:
            self.query_norm = nn.RMSNorm(epsilon=c.layer_norm_epsilon, dtype=dtype)
            self.key_norm = nn.RMSNorm(epsilon=c.layer_norm_epsilon, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B #H #T S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attend from x to `memory`, which is x itself or the encoder's output."""
        return self.attend(x, *self.project_keys_and_values(memory), mask, train=train)

    def project_queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        """Project x to queries: Q W^Q. If `query_key_norm` is set, normalize the queries."""
        query = self.query(x)
        return self.query_norm(query) if self.config.query_key_norm else query

    def project_keys_and_values(
        self, memory: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G V"]]:
        """Project the memory to keys and values, which cached decoding stores: K W^K and V W^V."""
        key = self.key(memory)
        return self.key_norm(key) if self.config.query_key_norm else key, self.value(memory)

    def attend(
        self,
        x: Float[Array, "B T D"],
        key: Float[Array, "B S G K"],
        value: Float[Array, "B S G V"],
        mask: Bool[Array, "#B #H #T S"],
        positions: Positions | None = None,
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attend from x to projected keys and values, for `__call__` and for cached decoding.

        By default, query and key positions start at 0.
        """
        if positions is None:
            positions = Positions(jnp.arange(x.shape[1]), jnp.arange(key.shape[1]))
        heads = Heads(self.project_queries(x), key, value, mask, positions)
        # Contracting the head and value axes is equivalent to concatenating the heads and
        # multiplying by W^O.
        return self.output(self.attend_heads(heads, train))

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        """Return Attention(Q, K, V) for each head (equation 1), ignoring positions."""
        scores = self.score(heads.query, heads.key)
        return weighted_sum(self.to_weights(scores, heads.mask, train=train), heads.value)

    def to_weights(
        self, scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"], *, train: bool
    ) -> Float[Array, "B H T S"]:
        """Record the softmax of the scores, and return it with dropout applied."""
        weights = masked_softmax(scores, mask)
        self.sow("intermediates", "weights", weights)
        return self.dropout(weights, train=train)
