"""Positional encodings (section 3.5), which are added to the embeddings in each stack.

Shapes: B batch, T positions, P positions in a learned table, D d_model.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.operations import normal


def sinusoid(positions: Int[Array, " T"], d_model: int) -> Float[Array, "T D"]:
    """Return interleaved sines and cosines with wavelengths from 2 pi to 10000 * 2 pi.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) is the cosine of the same
    angle, so PE(pos + k) is a linear function of PE(pos). `d_model` must be even.
    """
    # The dtype is float32, or float64 within `jax.enable_x64`.
    dtype = jnp.result_type(float)
    exponent = jnp.arange(0, d_model, 2, dtype=dtype) / d_model
    angle = jnp.outer(positions.astype(dtype), 10000.0**-exponent)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(len(positions), d_model)


class AddPositions(nn.Module):
    """A module that adds sinusoids to embeddings and applies dropout (sections 3.5 and 5.4).

    Variants override `encode`.
    """

    config: ModelConfig
    max_positions: int
    """The number of rows in a learned table. Only `AddLearnedPositions` has a table."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, " T"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        x = x + self.encode(positions)[None].astype(x.dtype)
        return Dropout(self.config.dropout)(x, train=train)

    def encode(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return the vectors to add: the paper's sinusoids."""
        return sinusoid(positions, self.config.d_model)


class AddLearnedPositions(AddPositions):
    """A module that adds learned vectors to the embeddings (row E of Table 3)."""

    def encode(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        shape = self.max_positions, self.config.d_model
        table = self.param("positions", self.init_table, shape)
        return table[self.to_rows(positions)]

    def init_table(self, rng: Array, shape: tuple[int, int]) -> Float[Array, "P D"]:
        """Return the initial table, which the paper does not specify."""
        length, d_model = shape
        match self.config.learned_positions_init:
            case "normal":
                return normal(d_model**-0.5)(rng, shape)
            case "sinusoidal_scale":
                # The mean square of sines and cosines is 1/2.
                return normal(0.5**0.5)(rng, shape)
            case "sinusoids":
                return sinusoid(jnp.arange(length), d_model)

    def to_rows(self, positions: Int[Array, " T"]) -> Int[Array, " T"]:
        """Return the index of the table row for each position, which is the position itself.

        On a device, an index past the end of an array does not raise an error, so this method
        checks the number of positions. The check does not cover cached decoding, which passes one
        position at a time, so `Translator` limits the length of translations.

        Raises:
            ValueError: there are more positions than table rows.
        """
        if len(positions) > self.max_positions:
            raise ValueError(
                f"{len(positions)} positions, but the learned table has {self.max_positions} "
                "(model.max_positions, or model.max_length): make it longer, or set "
                "model.out_of_range_positions to clamp"
            )
        return positions
