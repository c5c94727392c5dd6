"""Positional encodings (section 3.5): what is added to an embedding to tell its place.

A scheme is a function of the positions asked for, and one entry of `POSITIONS`; a scheme with
parameters declares them on the module that it is given.
Shapes: T positions, D d_model.
"""

from typing import Protocol

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int


class Positions(Protocol):
    """Encode some positions for the stack of layers that `module` embeds for.

    `length` is how many positions a table must hold. Lengths are checked on the host (`Config`,
    `Translator.encode`): an index past the end of an array is not an error on a device.
    """

    def __call__(
        self, module: nn.Module, positions: Int[Array, " T"], *, length: int, d_model: int
    ) -> Float[Array, "T D"]: ...


def sinusoid(positions: Int[Array, " T"], d_model: int) -> Float[Array, "T D"]:
    """Sines and cosines, interleaved, of wavelengths from 2 pi to 10000 * 2 pi.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos of the same, so
    that PE(pos + k) is a linear function of PE(pos). `d_model` must be even.
    """
    exponent = jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model
    angle = positions[:, None].astype(jnp.float32) * 10000.0**-exponent
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(len(positions), d_model)


def sinusoidal(
    module: nn.Module, positions: Int[Array, " T"], *, length: int, d_model: int
) -> Float[Array, "T D"]:
    """The paper's choice: `sinusoid`, at any position."""
    del module, length
    return sinusoid(positions, d_model)


def concatenated_sinusoidal(
    module: nn.Module, positions: Int[Array, " T"], *, length: int, d_model: int
) -> Float[Array, "T D"]:
    """Tensor2Tensor's sinusoids: all sines, then all cosines.

    Differs from the paper: angle i is pos / 10000^(i / (d_model / 2 - 1)), and the longest
    wavelength so 10000 * 2 pi.
    """
    del module, length
    exponent = jnp.linspace(0.0, 1.0, d_model // 2)
    angle = positions[:, None].astype(jnp.float32) * 10000.0**-exponent
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def learned(
    module: nn.Module, positions: Int[Array, " T"], *, length: int, d_model: int
) -> Float[Array, "T D"]:
    """A table of vectors, trained with the rest (row E of Table 3); each stack has its own."""
    init = nn.initializers.normal(d_model**-0.5)
    return jnp.asarray(module.param("positions", init, (length, d_model)))[positions]


def none(
    module: nn.Module, positions: Int[Array, " T"], *, length: int, d_model: int
) -> Float[Array, "T D"]:
    """Nothing: the encoder sees a bag of words. Differs from the paper, to show the need."""
    del module, length
    return jnp.zeros((len(positions), d_model))


POSITIONS: dict[str, Positions] = {
    "sinusoidal": sinusoidal,
    "concatenated_sinusoidal": concatenated_sinusoidal,
    "learned": learned,
    "none": none,
    # Told within self-attention (`relations`).
    "alibi": none,
    "rotary": none,
    "relative": none,
}
