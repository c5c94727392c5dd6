"""The layer types in Table 1, as modules that map a sequence to a sequence of the same shape.

The modules do not include residual connections or normalization. `LAYERS` maps the layer names in
Table 1 to these modules.
Shapes: B batch, T positions (n in Table 1), D d_model (d in Table 1).
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.build import choose_components


class SelfAttention(nn.Module):
    """Multi-head self-attention (section 3.2): O(n^2 d), not counting its four projections."""

    d_model: int
    num_heads: int = 8
    window: int | None = None
    """The maximum distance between a query and a key, or None for no limit."""

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Attend from each position to all positions, or only to those within the window."""
        width = self.d_model // self.num_heads
        config = ModelConfig(
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_k=width,
            d_v=width,
            attention_window=self.window,
            positions="none",
        )
        components = choose_components(config)
        attention = components.self_attention(config, components.make_score)
        return attention(x, x, jnp.ones((1, 1, 1, x.shape[1]), bool))


class RestrictedSelfAttention(SelfAttention):
    """Self-attention restricted to positions at most `window` away (section 4): O(r n d)."""

    window: int | None = 64


class Recurrent(nn.Module):
    """An LSTM that reads the sequence from left to right: O(n d^2)."""

    d_model: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the LSTM's output at each position."""
        return jnp.asarray(nn.RNN(nn.OptimizedLSTMCell(self.d_model))(x))


class Convolution(nn.Module):
    """A zero-padded convolution over the positions: O(k n d^2)."""

    d_model: int
    kernel_width: int = 3

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the convolution's output at each position."""
        return nn.Conv(self.d_model, (self.kernel_width,))(x)


class SeparableConvolution(nn.Module):
    """A depthwise convolution followed by a linear layer at each position: O(k n d + n d^2).

    The convolution mixes positions within a channel, and the linear layer mixes channels within a
    position (Chollet 2016).
    """

    d_model: int
    kernel_width: int = 3

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the output of the linear layer at each position."""
        width = self.kernel_width
        x = nn.Conv(
            self.d_model, (width,), feature_group_count=self.d_model, use_bias=False, name="depth"
        )(x)
        return nn.Dense(self.d_model, name="point")(x)


LAYERS: Mapping[str, type[nn.Module]] = {
    "Self-Attention": SelfAttention,
    "Recurrent": Recurrent,
    "Convolutional": Convolution,
    "Separable Convolutional": SeparableConvolution,
    "Self-Attention (restricted)": RestrictedSelfAttention,
}
"""The module classes, keyed by the layer names in Table 1. To construct a layer, pass `d_model` to
its class."""
