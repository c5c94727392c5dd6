"""A normalization and feed-forward networks that differ from the paper.

Shapes: B batch, T positions, D d_model.
"""

from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.layers import FeedForward
from transformer_jax.model.linear import Dense


def rms_norm(config: ModelConfig, *, name: str | None = None) -> nn.RMSNorm:
    """Return a module for x / sqrt(mean(x^2) + epsilon) * g (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(epsilon=config.layer_norm_epsilon, dtype=config.dtype, name=name)


class GatedFeedForward(FeedForward):
    """FFN(x) = (activation(x W + b) * (x V + c)) W2 + b2 (Shazeer 2020, equation 6).

    `gate` holds W and b, `inner` holds V and c, and `outer` holds W2 and b2. SwiGLU uses swish, and
    GeGLU uses GELU. Shazeer omits the biases and, because this network has three matrices instead
    of two, reduces `d_ff` by a third.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, train: bool = False) -> Float[Array, "B T D"]:
        c, bias = self.config, self.config.feed_forward_bias
        gate = self.activation(Dense((c.d_ff,), c.dtype, use_bias=bias, name="gate")(x))
        x = gate * Dense((c.d_ff,), c.dtype, use_bias=bias, name="inner")(x)
        x = Dropout(c.activation_dropout)(x, train=train)
        return Dense((c.d_model,), c.dtype, use_bias=bias, name="outer")(x)
