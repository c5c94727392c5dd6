"""Dropout (section 5.4) with random bits that are almost free to compute.

A hash of the random key and of each element's index in the array determines the dropout mask, so
the mask is the same on any number of devices. XLA fuses the hash into the operation that uses it
and does not store the random bits. If a device computes only some of the rows, the computation must
run within `drawing_for_shard`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, UInt32

Rate = Float[ArrayLike, ""]
"""A dropout rate. In a compiled training step, the rate is an array, because it is an argument to
the program."""


# `jit` traces this function once per shape, which makes tracing the base model 20% faster.
@jax.jit
def dropout(x: Float[Array, "*shape"], rate: Rate, rng: Array) -> Float[Array, "*shape"]:
    """Zero each element with probability `rate`, and scale the others to preserve the mean."""
    keep = keep_mask(rng, rate, linear_indices(x.shape))
    scale = jnp.asarray(1 / (1 - jnp.asarray(rate, float)), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))


def keep_mask(rng: Array, rate: Rate, index: UInt32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return a mask of the elements that dropout keeps, each with probability 1 - `rate`."""
    # In float32, the product is exact and less than 2^32.
    threshold = (jnp.asarray(rate, jnp.float32) * 2.0**32).astype(jnp.uint32)
    return random_bits(rng, index) >= threshold


def random_bits(rng: Array, index: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return 32 random bits for each element of an array: a hash of the index and the key.

    The key must be a "threefry2x32" key, which is JAX's default. The shifts and the first two
    multipliers come from lowbias32 (Chris Wellons, hash-prospector). An extra round uses a third
    multiplier, a prime close to 2^32 divided by the golden ratio. Without the extra round, the
    dropout masks of similar keys would be correlated.
    """
    first, second = jax.random.key_data(rng)
    bits = index + first
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D) + second
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x9E3779B1)
    return bits ^ (bits >> 15)


def linear_indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the row-major index of each element in an array of this shape."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


class Dropout(nn.Module):
    """A module that applies `dropout` with a key from Flax's "dropout" RNG stream.

    Each dropout module gets its own key.
    """

    rate: Rate

    def draw_key(self, shape: tuple[int, ...], *, train: bool) -> Array | None:
        """Return the random key for an array of this shape, or None if dropout is off.

        Dropout is on if its rate is an array, because one program serves all rates.
        """
        if not train or (isinstance(self.rate, float | int) and self.rate == 0):
            return None
        rng, shard_index = self.make_rng("dropout"), _SHARD_INDEX.get()
        if shard_index is None:
            return rng
        # If the whole array has more than 2^32 elements, the indices wrap around.
        return skip_bits(rng, shard_index.astype(jnp.uint32) * jnp.uint32(math.prod(shape) % 2**32))

    def __call__(self, x: Float[Array, "*shape"], *, train: bool) -> Float[Array, "*shape"]:
        """Apply dropout to x if `train` is true, unless the rate is the constant 0."""
        rng = self.draw_key(x.shape, train=train)
        return x if rng is None else dropout(x, self.rate, rng)


_SHARD_INDEX = ContextVar[Int[Array, ""] | None]("shard_index", default=None)


@contextmanager
def drawing_for_shard(index: Int[Array, ""]) -> Iterator[None]:
    """Make every `Dropout` treat its array as shard `index` of a larger array.

    The shards are consecutive and have equal numbers of rows. Applying dropout to each shard gives
    the same result as applying it to the whole array.
    """
    token = _SHARD_INDEX.set(index)
    try:
        yield
    finally:
        _SHARD_INDEX.reset(token)


def skip_bits(rng: Array, count: UInt32[Array, ""]) -> Array:
    """Return a key whose random bits at index i equal those of `rng` at index i + `count`."""
    # `random_bits` adds the key's first word to the index.
    first, second = jax.random.key_data(rng)
    data = jnp.stack([first + count, second])
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(rng))
