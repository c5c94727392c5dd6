"""Attention masks (section 3.2.3): boolean arrays that are True where attention is allowed.

Shapes: B batch, S source positions, T target positions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.special_tokens import PAD


def source_mask(source: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Return a mask that allows attention to everything except padding."""
    return (source != PAD)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Return a mask that lets positions attend to themselves and earlier positions.

    Padding does not need a mask, because it follows all target tokens.
    """
    return jnp.tril(jnp.ones((1, 1, length, length), bool))
