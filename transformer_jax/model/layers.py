"""Encoder and decoder layers: sub-layers with residual connections (sections 3.1 and 3.3).

Shapes: B batch, T positions (in a decoder layer, target positions), S source positions, D d_model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MakeScore, MultiHeadAttention
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.linear import Dense
from transformer_jax.model.positions import AddPositions

Activation = Callable[[Array], Array]
"""An elementwise function, such as ReLU."""

MakeNorm = Callable[..., Callable[[Array], Array]]
"""A class or function that returns a Flax module for a config. The module normalizes each vector of
x [B, T, D]. The optional keyword argument `name` is the module's name in Flax."""

MakeFeedForward = Callable[[ModelConfig], Callable[..., Array]]
"""A class or function that returns a Flax module for a config. The module maps x [B, T, D] and the
keyword argument `train` to an array of the same shape."""


def check_shape(part: str, output: Array, like: Array) -> Array:
    """Return the output of a part of the model, which must have the same shape as `like`.

    Raises:
        ValueError: the shapes differ. A sum could otherwise hide the mistake by broadcasting.
    """
    if output.shape != like.shape:
        raise ValueError(f"{part} must return shape {like.shape}, got {output.shape}")
    return output


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2, applied to each position (equation 2).

    `inner` holds the parameters W1 and b1, and `outer` holds W2 and b2. Variants replace the ReLU,
    max(0, x), with a different activation function. The paper has no dropout between the two
    layers, so `activation_dropout` is 0 by default.
    """

    config: ModelConfig
    activation: Activation = nn.relu

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T D"]:
        c, bias = self.config, self.config.feed_forward_bias
        x = self.activate(Dense((c.d_ff,), c.dtype, use_bias=bias, name="inner")(x))
        x = Dropout(c.activation_dropout)(x, train=train)
        return Dense((c.d_model,), c.dtype, use_bias=bias, name="outer")(x)

    def activate(self, x: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """Apply the activation function to each element."""
        return check_shape("an activation function", self.activation(x), x)


def layer_norm(config: ModelConfig, *, name: str | None = None) -> nn.LayerNorm:
    """Return a layer normalization module with the config's epsilon and dtype."""
    return nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=config.dtype, name=name)


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), the residual connection in section 3.1 and figure 1.

    A layer computes `y = Sublayer(enter(x))` and then `leave(x, y)`. In Tensor2Tensor, `enter` and
    `leave` are called `layer_preprocess` and `layer_postprocess`. In the paper, `enter` returns x,
    and no normalization follows a stack. The pre-norm variant, `NormAndAdd`, normalizes in `enter`
    and after each stack, but not in `leave`.
    """

    config: ModelConfig
    make_norm: MakeNorm = layer_norm

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the sub-layer's input: x itself."""
        return x

    @nn.compact
    def leave(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        """Add the sub-layer's output y to x and normalize the sum."""
        x = x + Dropout(self.config.dropout)(check_shape("a sub-layer", y, x), train=train)
        return self.make_norm(self.config, name="norm")(x)

    @staticmethod
    def make_final_norm(_config: ModelConfig, _make_norm: MakeNorm, /) -> Callable[[Array], Array]:
        """Return the function to apply after the last layer of each stack: the identity."""
        return lambda x: x


@dataclass(frozen=True)
class Components:
    """The Transformer modules that have variants. `build` chooses each module from the config."""

    add_positions: type[AddPositions]
    self_attention: type[MultiHeadAttention]
    causal_self_attention: type[MultiHeadAttention]
    """The decoder's self-attention, in which the mask hides later keys. This class differs from
    `self_attention` only for T5 positions, which would otherwise waste half of their buckets on
    later keys.
    """
    cross_attention: type[MultiHeadAttention]
    make_score: MakeScore
    feed_forward: MakeFeedForward
    norm: MakeNorm
    residual: type[AddAndNorm]
    encoder_layer: "type[EncoderLayer]"
    decoder_layer: "type[DecoderLayer]"


class EncoderLayer(nn.Module):
    """Self-attention, followed by the feed-forward network (figure 1)."""

    config: ModelConfig
    components: Components

    def setup(self) -> None:
        c, components = self.config, self.components
        residual = partial(components.residual, c, components.norm)
        self.self_attention = components.self_attention(c, components.make_score)
        self.feed_forward = components.feed_forward(c)
        # Parameter names follow figure 1, where "Add & Norm" comes after each sub-layer. Pre-norm
        # keeps these names, although it normalizes before each sub-layer.
        self.self_attention_residual = residual(name="after_self_attention")
        self.feed_forward_residual = residual(name="after_feed_forward")

    # `train` is not keyword-only, because `nn.remat` identifies static arguments by position.
    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B 1 1 S"], train: bool = False
    ) -> Float[Array, "B S D"]:
        """Return the layer's output; `mask` is True where attention is allowed."""
        h = self.self_attention_residual.enter(x)
        attended = self.self_attention(h, h, mask, train=train)
        x = self.self_attention_residual.leave(x, attended, train=train)
        h = self.feed_forward_residual.enter(x)
        return self.feed_forward_residual.leave(x, self.feed_forward(h, train=train), train=train)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the memory, and the feed-forward network (figure 1)."""

    config: ModelConfig
    components: Components

    def setup(self) -> None:
        c, components = self.config, self.components
        residual = partial(components.residual, c, components.norm)
        self.self_attention = components.causal_self_attention(c, components.make_score)
        self.cross_attention = components.cross_attention(c, components.make_score)
        self.feed_forward = components.feed_forward(c)
        self.self_attention_residual = residual(name="after_self_attention")
        self.cross_attention_residual = residual(name="after_cross_attention")
        self.feed_forward_residual = residual(name="after_feed_forward")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 T T"],
        memory_mask: Bool[Array, "#B 1 1 S"],
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Return the layer's output; masks are True where attention is allowed."""

        def attend(h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            return self.self_attention(h, h, mask, train=train)

        def read_memory(h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            return self.cross_attention(h, memory, memory_mask, train=train)

        return self.connect(x, attend, read_memory, train=train)

    def connect(
        self,
        x: Float[Array, "B T D"],
        attend: Callable[[Array], Array],
        read_memory: Callable[[Array], Array],
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Return the layer's output, given its two kinds of attention as functions.

        Cached decoding passes functions that attend to stored keys and values.
        """
        h = self.self_attention_residual.enter(x)
        x = self.self_attention_residual.leave(x, attend(h), train=train)
        h = self.cross_attention_residual.enter(x)
        x = self.cross_attention_residual.leave(x, read_memory(h), train=train)
        h = self.feed_forward_residual.enter(x)
        return self.feed_forward_residual.leave(x, self.feed_forward(h, train=train), train=train)
