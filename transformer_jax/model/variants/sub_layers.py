"""Small modules that differ from the paper.

The modules are norms, feed-forward networks, positional encodings, attention scores with
parameters, and a linear layer before the softmax.

Shapes: B batch, T positions or queries, S keys, D d_model, H heads, G key-value heads, K d_k, N
vocab_size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import dot_product, repeat_heads
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.layers import AddAndNorm, FeedForward, MakeNorm, check_shape
from transformer_jax.model.linear import Dense
from transformer_jax.model.operations import normal, sum_dtype
from transformer_jax.model.positions import AddLearnedPositions, AddPositions
from transformer_jax.model.transformer import Transformer


def rms_norm(config: ModelConfig, *, name: str | None = None) -> nn.RMSNorm:
    """Return a module for x / sqrt(mean(x^2) + epsilon) * g (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(epsilon=config.layer_norm_epsilon, dtype=config.dtype, name=name)


class NormAndAdd(AddAndNorm):
    """x + Dropout(Sublayer(Norm(x))), with a final norm after each stack (Xiong et al. 2020)."""

    def setup(self) -> None:
        self.norm = self.make_norm(self.config)
        self.dropout = Dropout(self.config.dropout)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(x)

    def leave(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        return x + self.dropout(check_shape("a sub-layer", y, x), train=train)

    @staticmethod
    def make_final_norm(config: ModelConfig, make_norm: MakeNorm, /) -> Callable[[Array], Array]:
        return make_norm(config)


class GatedFeedForward(FeedForward):
    """FFN(x) = (activation(x W + b) * (x V + c)) W2 + b2 (Shazeer 2020, equation 6).

    `gate` holds W and b, `inner` holds V and c, and `outer` holds W2 and b2. SwiGLU uses swish, and
    GeGLU uses GELU. Shazeer omits the biases and, because this network has three matrices instead
    of two, reduces `d_ff` by a third.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T D"]:
        c, bias = self.config, self.config.feed_forward_bias
        gate = self.activate(Dense((c.d_ff,), c.dtype, use_bias=bias, name="gate")(x))
        x = gate * Dense((c.d_ff,), c.dtype, use_bias=bias, name="inner")(x)
        x = Dropout(c.activation_dropout)(x, train=train)
        return Dense((c.d_model,), c.dtype, use_bias=bias, name="outer")(x)


class AddConcatenatedSinusoids(AddPositions):
    """A module that adds Tensor2Tensor's sinusoids: all sines, then all cosines.

    Angle i is pos / 10000^(i / (d_model / 2 - 1)).
    """

    def encode(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return the vectors to add; `d_model` must be even."""
        exponent = jnp.linspace(0.0, 1.0, self.config.d_model // 2)
        angle = jnp.outer(positions.astype(jnp.float32), 10000.0**-exponent)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class AddNothing(AddPositions):
    """A module that only applies dropout.

    Models without positional encodings, or with encodings inside self-attention, use this module.
    """

    def encode(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        return jnp.zeros((len(positions), self.config.d_model))


class AddClampedPositions(AddLearnedPositions):
    """A module that adds rows of a learned table to its input.

    Positions past the end of the table use its last row.
    """

    def to_rows(self, positions: Int[Array, " T"]) -> Int[Array, " T"]:
        return jnp.minimum(positions, self.max_positions - 1)


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


class BiasedTransformer(Transformer):
    """A Transformer that, like Marian, adds a learned per-token bias to the logits."""

    def setup(self) -> None:
        super().setup()
        self.output_bias = self.param("output_bias", nn.initializers.zeros, (self.vocab_size,))

    def to_logits(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T N"]:
        logits = super().to_logits(x, train=train)
        return logits + self.output_bias.astype(logits.dtype)[None, None]
