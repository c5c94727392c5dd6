"""Layers that normalise before each sub-layer, and not after it (Xiong et al. 2020).

Differs from the paper: x + Dropout(Sublayer(LayerNorm(x))), so that nothing on the way through a
stack is normalised, but once at its end.
Shapes: B batch, T target positions, S source positions, D d_model, J hypotheses of a sentence.
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.layers import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    KeysAndValues,
    Past,
)
from transformer_jax.model.variants.relative_positions import SELF_ATTENTIONS


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Return a LayerNorm like those of the paper's layers."""
    return nn.LayerNorm(config.layer_norm_epsilon, dtype=config.dtype)


class PreNormEncoderLayer(EncoderLayer):
    """The sub-layers of `EncoderLayer`, each behind a LayerNorm."""

    def setup(self) -> None:
        c = self.config
        self.self_attention_norm = layer_norm(c)
        self.self_attention = SELF_ATTENTIONS[c.positions](c)
        self.feed_forward_norm = layer_norm(c)
        self.feed_forward = FeedForward(c)
        self.dropout = Dropout(c.dropout)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B 1 1 S"], train: bool = False
    ) -> Float[Array, "B S D"]:
        y = self.self_attention_norm(x)
        x = x + self.dropout(self.self_attention(y, y, mask, train=train), train=train)
        y = self.feed_forward_norm(x)
        return x + self.dropout(self.feed_forward(y, train=train), train=train)


class PreNormDecoderLayer(DecoderLayer):
    """The sub-layers of `DecoderLayer`, each behind a LayerNorm."""

    def setup(self) -> None:
        c = self.config
        self.self_attention_norm = layer_norm(c)
        self.self_attention = SELF_ATTENTIONS[c.positions](c)
        self.cross_attention_norm = layer_norm(c)
        self.cross_attention = MultiHeadAttention(c)
        self.feed_forward_norm = layer_norm(c)
        self.feed_forward = FeedForward(c)
        self.dropout = Dropout(c.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 T T"],
        memory_mask: Bool[Array, "#B 1 1 S"],
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        y = self.self_attention_norm(x)
        x = x + self.dropout(self.self_attention(y, y, mask, train=train), train=train)
        y = self.cross_attention_norm(x)
        attended = self.cross_attention(y, memory, memory_mask, train=train)
        x = x + self.dropout(attended, train=train)
        y = self.feed_forward_norm(x)
        return x + self.dropout(self.feed_forward(y, train=train), train=train)

    def step(
        self,
        x: Float[Array, "B J D"],
        past: Past,
        cache: KeysAndValues,
        memory: KeysAndValues,
        memory_mask: Bool[Array, "#B 1 1 S"],
    ) -> tuple[Float[Array, "B J D"], KeysAndValues]:
        """Do for one position what `__call__` does, as `DecoderLayer.step`."""
        attended, cache = self.attend_to_past(self.self_attention_norm(x), past, cache)
        x = x + attended
        x = x + self.attend_to_memory(self.cross_attention_norm(x), memory, memory_mask)
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class Stacks(NamedTuple):
    """What the two stacks are made of."""

    encoder_layer: type[EncoderLayer]
    decoder_layer: type[DecoderLayer]
    last: Callable[[ModelConfig], Callable[[Array], Array]]
    """What comes after the last layer of each."""


STACKS = {
    "post": Stacks(EncoderLayer, DecoderLayer, lambda _: lambda x: x),
    "pre": Stacks(PreNormEncoderLayer, PreNormDecoderLayer, layer_norm),
}
