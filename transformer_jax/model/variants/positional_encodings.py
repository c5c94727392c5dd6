"""Positional encodings that differ from the paper. Shapes: T positions, D d_model."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.model.positions import AddLearnedPositions, AddPositions


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
        """Return zeros."""
        return jnp.zeros((len(positions), self.config.d_model))


class AddClampedPositions(AddLearnedPositions):
    """A module that adds rows of a learned table to its input.

    Positions past the end of the table use its last row.
    """

    def to_rows(self, positions: Int[Array, " T"]) -> Int[Array, " T"]:
        """Return the index of the table row for each position."""
        return jnp.minimum(positions, self.max_positions - 1)
