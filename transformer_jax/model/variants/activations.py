"""Activations for the feed-forward networks, as alternatives to the paper's ReLU."""

from flax import linen as nn
from jaxtyping import Array, Float


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x times the probability that a standard normal variable is below x."""
    return nn.gelu(x, approximate=False)
