"""Dropout (section 5.4), with random bits that cost next to nothing.

A mask is a pure function of (random key, place in the array): a hash of each element's index,
which XLA computes inside the operation that uses it. So it is the same on any number of
devices, and no array of bits is ever stored.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, UInt32


def linear_indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the place of each element in an array of this shape, row by row."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def random_bits(rng: Array, index: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return 32 random bits for each element of an array: a hash of its index and the key.

    Three rounds of multiply and shift. Half of the key enters before the first, half after it,
    and two full rounds follow: after only one, two keys of nearly equal halves would give
    masks that exclude one another. The key is one of "threefry2x32", JAX's default generator.
    Differs from `jax.random.bits` in the generator only.
    """
    first, second = jax.random.key_data(rng).astype(jnp.uint32)
    bits = index + first
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D) + second
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x9E3779B1)
    return bits ^ (bits >> 15)


def keep_mask(rng: Array, rate: float, index: UInt32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Tell which elements dropout keeps, each with probability 1 - `rate`."""
    threshold = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return random_bits(rng, index) >= threshold


@functools.partial(jax.jit, static_argnames="rate")
def dropout(x: Float[Array, "*shape"], rate: float, rng: Array) -> Float[Array, "*shape"]:
    """Set each element to zero with probability `rate`, and scale the others to the same mean."""
    # Under `jit`, places of one shape are traced once: a fifth less time to trace the base model.
    keep = keep_mask(rng, rate, linear_indices(x.shape))
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


class Dropout(nn.Module):
    """`dropout` as a module, which draws its key from the "dropout" stream of its place."""

    rate: float

    def key(self, *, train: bool) -> Array | None:
        """Return the random key of this place; None where nothing is dropped."""
        return self.make_rng("dropout") if train and self.rate > 0 else None

    def __call__(self, x: Float[Array, "*shape"], *, train: bool) -> Float[Array, "*shape"]:
        rng = self.key(train=train)
        return x if rng is None else dropout(x, self.rate, rng)
