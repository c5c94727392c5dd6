"""Encoder and decoder layers: sub-layers, each with a residual around it (sections 3.1, 3.3).

Shapes: B batch, T target positions, S source positions, D d_model, H heads, K d_k, V d_v,
L longest translation, J hypotheses of a sentence. `_` is any size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention, Places
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import matrix_product
from transformer_jax.model.variants.relative_positions import SELF_ATTENTIONS

KeysAndValues = tuple[Float[Array, "B H K _"], Float[Array, "B H _ V"]]
"""As the products of a step of a translation read them: a key is a column, a value a row."""


class Past(NamedTuple):
    """What one position of J hypotheses of each sentence may look at.

    The cache has L J slots: one for each position and each row that read a piece there.
    """

    slot: Int[Array, ""]
    """The first of the position's own J slots."""
    mask: Bool[Array, "B 1 J LJ"]
    """Which slots hold the hypothesis's own pieces up to this position."""
    places: Places
    """Where queries and slots stand."""

    @classmethod
    def of(cls, position: Int[Array, ""], ancestors: Int[Array, "B J L"]) -> "Past":
        """Find them: ancestors[b, j, l] is the row that read piece l of hypothesis j."""
        _, hypotheses, length = ancestors.shape
        rows = jnp.arange(hypotheses)
        is_past = jnp.arange(length)[:, None] <= position
        mask = (ancestors[..., None] == rows) & is_past
        return cls(
            slot=position * hypotheses,
            mask=mask.reshape(*ancestors.shape[:2], -1)[:, None],
            places=Places(
                jnp.full(hypotheses, position), jnp.repeat(jnp.arange(length), hypotheses)
            ),
        )


def kept(key: Float[Array, "B S H K"], value: Float[Array, "B S H V"]) -> KeysAndValues:
    """Turn keys and values the way they are kept."""
    return key.transpose(0, 2, 3, 1), value.swapaxes(1, 2)


def read(
    key: Float[Array, "B H K S"], value: Float[Array, "B H S V"]
) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Turn them back."""
    return key.transpose(0, 3, 1, 2), value.swapaxes(1, 2)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2, at each position alike (equation 2)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T D"]:
        c = self.config

        def linear(features: int, name: str) -> nn.Dense:
            return nn.Dense(
                features,
                dtype=c.dtype,
                kernel_init=nn.initializers.xavier_uniform(),
                dot_general=matrix_product,
                name=name,
            )

        x = nn.relu(linear(c.d_ff, "inner")(x))
        x = Dropout(c.activation_dropout)(x, train=train)
        return linear(c.d_model, "outer")(x)


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper normalises after the sum (section 3.1)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        sublayer_output: Float[Array, "B T D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        c = self.config
        x = x + Dropout(c.dropout)(sublayer_output, train=train)
        return nn.LayerNorm(c.layer_norm_epsilon, dtype=c.dtype, name="norm")(x)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = SELF_ATTENTIONS[self.config.positions](self.config)
        self.after_self_attention = AddAndNorm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.after_feed_forward = AddAndNorm(self.config)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B 1 1 S"], train: bool = False
    ) -> Float[Array, "B S D"]:
        attended = self.self_attention(x, x, mask, train=train)
        x = self.after_self_attention(x, attended, train=train)
        return self.after_feed_forward(x, self.feed_forward(x, train=train), train=train)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's output, the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = SELF_ATTENTIONS[self.config.positions](self.config)
        self.after_self_attention = AddAndNorm(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.after_cross_attention = AddAndNorm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.after_feed_forward = AddAndNorm(self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 T T"],
        memory_mask: Bool[Array, "#B 1 1 S"],
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        attended = self.self_attention(x, x, mask, train=train)
        x = self.after_self_attention(x, attended, train=train)
        attended = self.cross_attention(x, memory, memory_mask, train=train)
        x = self.after_cross_attention(x, attended, train=train)
        return self.after_feed_forward(x, self.feed_forward(x, train=train), train=train)

    def memory_keys_and_values(self, memory: Float[Array, "B S D"]) -> KeysAndValues:
        """Project the encoder's output once, for all steps of a translation."""
        return kept(*self.cross_attention.keys_and_values(memory))

    def attend_to_past(
        self, x: Float[Array, "B J D"], past: Past, cache: KeysAndValues
    ) -> tuple[Float[Array, "B J D"], KeysAndValues]:
        """Attend to a position itself and to earlier ones; return the cache with it written in.

        The slots of all hypotheses are looked at by each, and masked: that costs less than to
        move the cache whenever one hypothesis takes the row of another.
        """
        new = kept(*self.self_attention.keys_and_values(x))
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(old, now, past.slot, axis)
            for old, now, axis in zip(cache, new, (3, 2), strict=True)
        )
        attended = self.self_attention.attend(x, *read(key, value), past.mask, places=past.places)
        return attended, (key, value)

    def attend_to_memory(
        self, x: Float[Array, "B J D"], memory: KeysAndValues, mask: Bool[Array, "#B 1 1 S"]
    ) -> Float[Array, "B J D"]:
        """Attend to the encoder's output; the hypotheses are J queries to one memory."""
        return self.cross_attention.attend(x, *read(*memory), mask)

    def step(
        self,
        x: Float[Array, "B J D"],
        past: Past,
        cache: KeysAndValues,
        memory: KeysAndValues,
        memory_mask: Bool[Array, "#B 1 1 S"],
    ) -> tuple[Float[Array, "B J D"], KeysAndValues]:
        """Do what `__call__` does for one position of J hypotheses of each sentence.

        Args:
            x: the position's vectors.
            past: which position it is, and what came before it.
            cache: self-attention's keys and values of earlier positions, in L J slots.
            memory: the encoder's output as `memory_keys_and_values` gives it.
            memory_mask: which of it are tokens.

        Returns:
            The layer's output, and the cache with this position written into it.
        """
        attended, cache = self.attend_to_past(x, past, cache)
        x = self.after_self_attention(x, attended)
        x = self.after_cross_attention(x, self.attend_to_memory(x, memory, memory_mask))
        return self.after_feed_forward(x, self.feed_forward(x)), cache
