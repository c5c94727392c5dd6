"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D d_model, H heads, K d_k, V d_v.
Masks are boolean, and True where attention is allowed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import matrix_product
from transformer_jax.model.variants.attention_scores import Additive, General
from transformer_jax.model.variants.blockwise_attention import blockwise_attention

# From so many pairs of a query and a key on, attention goes block by block, with the same result.
# On two CPU cores a training step of 2048 pieces then takes 0.50 of the time at length 2048, and
# 0.89 at 1024. At 512 it would too, but not in each round, and would take longer to compile.
LONG = 1024 * 1024


class Places(NamedTuple):
    """Where in their sentences queries and keys stand, counted from 0."""

    queries: Int[Array, " T"]
    keys: Int[Array, " S"]


Score = Callable[[Float[Array, "B T H K"], Float[Array, "B S H K"]], Float[Array, "B H T S"]]


def dot_product(
    query: Float[Array, "B T H K"], key: Float[Array, "B S H K"]
) -> Float[Array, "B H T S"]:
    """Compare each query with each key by their dot product.

    Its variance grows with d_k, which pushes the softmax to where its gradient is small
    (section 3.2.1). Differs from the paper: it scales.
    """
    # In float32 whatever the compute dtype: bfloat16 would round the large scores.
    return jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32)


def scaled_dot_product(
    query: Float[Array, "B T H K"], key: Float[Array, "B S H K"]
) -> Float[Array, "B H T S"]:
    """Compare each query with each key: dot product over sqrt(d_k), of variance one."""
    return dot_product(query, key) * query.shape[-1] ** -0.5


SCORES: dict[str, Callable[[ModelConfig], Score]] = {
    "scaled_dot_product": lambda _: scaled_dot_product,
    "dot_product": lambda _: dot_product,
    "general": General,
    "additive": Additive,
}

# Of the scores that are dot products times something: what, by d_k.
FACTORS: dict[str, Callable[[int], float]] = {
    "scaled_dot_product": lambda d_k: d_k**-0.5,
    "dot_product": lambda _: 1.0,
}


def masked_softmax(
    scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"]
) -> Float[Array, "B H T S"]:
    """Turn scores into weights that sum to one over S (the softmax of equation 1).

    A query that may attend nowhere attends evenly: padded positions stay finite,
    and the loss leaves them out.
    """
    # In float32 too: bfloat16 sums lose the small weights.
    scores = scores.astype(jnp.float32)
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))


def weighted_sum(
    weights: Float[Array, "B H T S"], value: Float[Array, "B S H V"]
) -> Float[Array, "B T H V"]:
    """Average the values by their weights (equation 1)."""
    return jnp.einsum("bhts,bshv->bhtv", weights.astype(value.dtype), value).swapaxes(1, 2)


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own projection (section 3.2.2).

    The steps are separate methods, so that a decoder can keep `keys_and_values` from one step
    to the next. The weights of each call are sown as "weights" into "intermediates": they
    are kept only where the caller of `apply` says `mutable=["intermediates"]`.
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config

        def project(features: tuple[int, int] | int, axis: tuple[int, ...] = (-1,)) -> nn.Module:
            # Glorot of the whole matrix, [D, H K], not of one head.
            return nn.DenseGeneral(
                features,
                axis=axis,
                use_bias=c.attention_bias,
                dtype=c.dtype,
                kernel_init=nn.initializers.xavier_uniform(),
                dot_general=matrix_product,
            )

        self.query = project((c.num_heads, c.d_k))
        self.key = project((c.num_heads, c.d_k))
        self.value = project((c.num_heads, c.d_v))
        self.output = project(c.d_model, axis=(-2, -1))
        self.score = SCORES[c.attention_score](c)
        self.dropout = Dropout(c.attention_dropout)

    def keys_and_values(
        self, memory: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
        """Project what is attended to."""
        return self.key(memory), self.value(memory)

    def attend(
        self,
        x: Float[Array, "B T D"],
        key: Float[Array, "B S H K"],
        value: Float[Array, "B S H V"],
        mask: Bool[Array, "#B #H #T S"],
        *,
        places: Places | None = None,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Look up, for each position of x, a mix of the projected values.

        Queries and keys stand in order, unless `places` says how.
        """
        query = self.query(x)
        if self.goes_by_blocks(query, key):
            rng, rate = self.dropout.key(train=train), self.dropout.rate
            scale = FACTORS[self.config.attention_score](self.config.d_k)
            mixed = blockwise_attention(query, key, value, mask, scale=scale, rate=rate, rng=rng)
            return self.output(mixed)
        places = places or Places(jnp.arange(x.shape[1]), jnp.arange(key.shape[1]))
        weights = masked_softmax(self.compare(query, key, places), mask)
        self.sow("intermediates", "weights", weights)
        return self.output(self.mix(self.dropout(weights, train=train), value, places))

    def goes_by_blocks(self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"]) -> bool:
        """Tell whether to save the time and memory that all weights at once would take.

        Only where nobody asks for them, and scores are dot products and nothing else: `relations`
        compare or average in their own ways.
        """
        kind = type(self)
        return (
            query.shape[1] * key.shape[1] >= LONG
            and kind.compare is MultiHeadAttention.compare
            and kind.mix is MultiHeadAttention.mix
            and self.config.attention_score in FACTORS
            and not self.is_mutable_collection("intermediates")
        )

    def compare(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], places: Places
    ) -> Float[Array, "B H T S"]:
        """Score each query against each key, wherever they stand (but see `relations`)."""
        del places
        return self.score(query, key)

    def mix(
        self, weights: Float[Array, "B H T S"], value: Float[Array, "B S H V"], places: Places
    ) -> Float[Array, "B T H V"]:
        """Average the values, wherever they stand."""
        del places
        return weighted_sum(weights, value)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B #H #T S"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Let x attend to memory: to itself, or the decoder to the encoder's output."""
        return self.attend(x, *self.keys_and_values(memory), mask, train=train)
