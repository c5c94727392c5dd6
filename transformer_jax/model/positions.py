"""Positional encodings (section 3.5): what is added to an embedding to tell its place.

A scheme is a function of the positions asked for, and one entry of `POSITIONS`; a scheme with
parameters declares them on the module that it is given.
Shapes: T positions, D d_model.
"""

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

PastTable = Callable[[Int[Array, " T"], int], Int[Array, " T"]]
"""From the positions asked for, and a table's length, to rows of the table."""


def raise_out_of_range(positions: Int[Array, " T"], length: int) -> Int[Array, " T"]:
    """Refuse more positions than there are rows.

    Only their number can be looked at: their values are known on the device alone, where an index
    past the end of an array is no error. A search, which asks for one at a time, ends before
    (`Translator`).

    Raises:
        ValueError: there are more.
    """
    if len(positions) > length:
        raise ValueError(
            f"{len(positions)} positions, and a learned table has {length} (model.max_positions, "
            f"or model.max_length): make it longer, or choose model.out_of_range_positions clamp"
        )
    return positions


def clamp(positions: Int[Array, " T"], length: int) -> Int[Array, " T"]:
    """Let every place past the end be the last one. Differs from the paper, which has none."""
    return jnp.minimum(positions, length - 1)


PAST_TABLE: dict[str, PastTable] = {"error": raise_out_of_range, "clamp": clamp}


class Positions(Protocol):
    """Encode some positions for the stack of layers that `module` embeds for.

    `length` is how many positions a table holds, `past` what is done about those past its end.
    """

    def __call__(
        self,
        module: nn.Module,
        positions: Int[Array, " T"],
        *,
        length: int,
        past: PastTable,
        d_model: int,
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
    module: nn.Module,
    positions: Int[Array, " T"],
    *,
    length: int,
    past: PastTable,
    d_model: int,
) -> Float[Array, "T D"]:
    """The paper's choice: `sinusoid`, at any position."""
    del module, length, past
    return sinusoid(positions, d_model)


def concatenated_sinusoidal(
    module: nn.Module,
    positions: Int[Array, " T"],
    *,
    length: int,
    past: PastTable,
    d_model: int,
) -> Float[Array, "T D"]:
    """Tensor2Tensor's sinusoids: all sines, then all cosines.

    Differs from the paper: angle i is pos / 10000^(i / (d_model / 2 - 1)), and the longest
    wavelength so 10000 * 2 pi.
    """
    del module, length, past
    exponent = jnp.linspace(0.0, 1.0, d_model // 2)
    angle = positions[:, None].astype(jnp.float32) * 10000.0**-exponent
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def learned(
    module: nn.Module,
    positions: Int[Array, " T"],
    *,
    length: int,
    past: PastTable,
    d_model: int,
) -> Float[Array, "T D"]:
    """A table of vectors, trained with the rest (row E of Table 3); each stack has its own."""
    init = nn.initializers.normal(d_model**-0.5)
    table = jnp.asarray(module.param("positions", init, (length, d_model)))
    return table[past(positions, length)]


def none(
    module: nn.Module,
    positions: Int[Array, " T"],
    *,
    length: int,
    past: PastTable,
    d_model: int,
) -> Float[Array, "T D"]:
    """Nothing: the encoder sees a bag of words. Differs from the paper, to show the need."""
    del module, length, past
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
