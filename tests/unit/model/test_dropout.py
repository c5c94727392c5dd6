"""Test dropout: its rate, its mean, and the statistics of its random bits.

The random keys are fixed, so the tests are deterministic. The tests accept errors of up to five
standard deviations.
"""

import functools
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import InvalidRngError
from jaxtyping import Array
from numpy.typing import ArrayLike
from oracles import Floats, floats, normal

from transformer_jax.model.dropout import (
    Dropout,
    drawing_for_shard,
    dropout,
    linear_indices,
    random_bits,
)

SHAPES = [(60_000,), (1, 300, 200), (7, 3, 50, 61)]
RATES = [0.1, 0.3, 0.5, 0.9]


@functools.partial(jax.jit, static_argnums=(0, 1))
def dropped_ones(shape: tuple[int, ...], rate: float, rng: Array) -> Array:
    return dropout(jnp.ones(shape), rate, rng)


def is_zero(shape: tuple[int, ...], rate: float, rng: Array) -> Floats:
    """Return 1.0 for each dropped element and 0.0 for each kept element."""
    return floats(dropped_ones(shape, rate, rng) == 0)


def key_of(first: int, second: int) -> Array:
    """Return a random key made from two 32-bit halves."""
    return jax.random.wrap_key_data(jnp.asarray([first, second], jnp.uint32))


def deviations(x: ArrayLike, y: ArrayLike) -> float:
    """Return the correlation of x and y, in units of its standard error.

    The standard error assumes that x and y are independent.
    """
    x, y = np.ravel(floats(x)), np.ravel(floats(y))
    return float(np.corrcoef(x, y)[0, 1]) * len(x) ** 0.5


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fraction_of_zeros_is_the_rate(shape: tuple[int, ...], rate: float) -> None:
    size = np.prod(shape)
    zeros = is_zero(shape, rate, jax.random.key(1)).sum()
    assert abs(zeros - rate * size) < 5 * (size * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("rate", RATES)
def test_kept_elements_are_scaled_to_preserve_the_mean(rate: float) -> None:
    x = 3 + normal(0, 300, 200)
    y = floats(dropout(x, rate, jax.random.key(0)))
    is_kept = y != 0
    np.testing.assert_allclose(y[is_kept], floats(x)[is_kept] / (1 - rate), rtol=1e-6)
    deviation = (rate / (1 - rate) * np.mean(floats(x) ** 2) / x.size) ** 0.5
    assert abs(y.mean() - floats(x).mean()) < 5 * deviation


def test_dropped_elements_have_no_gradient() -> None:
    x, rng = normal(0, 40, 50), jax.random.key(0)
    gradient = jax.grad(lambda x: dropout(x, 0.3, rng).sum())(x)
    expected = np.where(floats(dropout(x, 0.3, rng)) == 0, 0, 1 / 0.7)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_every_element_is_dropped_equally_often() -> None:
    rate, draws = 0.1, 4000
    rngs = jax.random.split(jax.random.key(0), draws)
    zeros = jax.vmap(lambda rng: dropout(jnp.ones((5, 12)), rate, rng) == 0)(rngs)
    counts = floats(zeros).sum(axis=0)
    assert np.abs(counts - rate * draws).max() < 5 * (draws * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_neighbors_along_each_axis_are_independent(shape: tuple[int, ...], rate: float) -> None:
    zeros = is_zero(shape, rate, jax.random.key(2))
    for axis, size in enumerate(shape):
        for distance in (1, 2):
            if size > distance:
                earlier = np.take(zeros, range(size - distance), axis)
                later = np.take(zeros, range(distance, size), axis)
                assert abs(deviations(earlier, later)) < 5, (axis, distance)


HALVES = (0, 1, 77, 2**16, 2**31, 2**31 + 1)
KEYS = {
    "seeds": [jax.random.key(seed) for seed in range(6)],
    "steps": [jax.random.fold_in(jax.random.key(0), step) for step in range(6)],
    "splits": list(jax.random.split(jax.random.key(0), 6)),
    "same first half": [key_of(12345, second) for second in HALVES],
    "same second half": [key_of(first, 12345) for first in HALVES],
}


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("kind", KEYS)
def test_masks_of_different_keys_are_independent(kind: str, rate: float) -> None:
    masks = [is_zero((60_000,), rate, rng) for rng in KEYS[kind]]
    for (i, one), (j, other) in itertools.combinations(enumerate(masks), 2):
        assert abs(deviations(one, other)) < 5, (i, j)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("second", [8, 2**31 + 7, 3_000_000_000])
def test_masks_of_similar_keys_are_not_shifted_copies(second: int, rate: float) -> None:
    distance = 3
    one = is_zero((60_000,), rate, key_of(10, 7))
    other = is_zero((60_000,), rate, key_of(10 + distance, second))
    assert abs(deviations(one[distance:], other[:-distance])) < 5


def test_bits_are_balanced_and_bytes_uniform() -> None:
    count = 2**18
    bits = np.asarray(
        random_bits(jax.random.fold_in(jax.random.key(0), 1), linear_indices((count,)))
    )
    assert bits.dtype == np.uint32
    for shift in range(32):
        ones = ((bits >> shift) & 1).sum()
        assert abs(ones - count / 2) < 5 * count**0.5 / 2, shift
    for shift in range(0, 32, 8):
        counts = np.bincount((bits >> shift) & 255, minlength=256)
        expected = count / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # With 255 degrees of freedom, chi-squared has mean 255 and standard deviation 22.6.
        assert abs(chi_square - 255) < 5 * 22.6, shift


def test_every_pair_of_bits_is_independent() -> None:
    bits = np.asarray(random_bits(jax.random.key(5), linear_indices((2**16,))))
    planes = floats((bits[None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1)
    correlations = np.corrcoef(planes) - np.eye(32)
    assert np.abs(correlations).max() < 5 / 2**8


def test_compilation_does_not_change_a_mask() -> None:
    x, rng = normal(0, 30, 40), jax.random.key(3)
    with jax.disable_jit():
        expected = dropout(x, 0.3, rng)
    np.testing.assert_array_equal(dropout(x, 0.3, rng), expected)


ON_EIGHT_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformer_jax.model.dropout import dropout

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
x = jnp.arange(1.0, 16 * 6 * 5 + 1).reshape(16, 6, 5)
step = jax.jit(lambda x, rng: dropout(x, 0.3, rng))
outputs = []
for spec in (PartitionSpec(("x", "y")), PartitionSpec("x", "y"), PartitionSpec(None, "y")):
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    output = step(sharded, jax.random.key(4))
    assert len(output.sharding.device_set) == 8, output.sharding
    assert not output.sharding.is_fully_replicated, output.sharding
    outputs.append(np.asarray(output))
np.save(sys.argv[1], np.stack(outputs))
"""


def test_a_mask_is_the_same_on_one_device_and_on_eight(tmp_path: Path) -> None:
    path = tmp_path / "outputs.npy"
    command = [sys.executable, "-c", ON_EIGHT_DEVICES, str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    x = jnp.arange(1.0, 16 * 6 * 5 + 1).reshape(16, 6, 5)
    expected = dropout(x, 0.3, jax.random.key(4))
    for output in np.load(path):
        np.testing.assert_array_equal(output, expected)


def test_shards_drop_the_same_elements_as_the_whole_array() -> None:
    x, rngs = normal(0, 6, 5, 4), {"dropout": jax.random.key(4)}
    shards: list[Any] = []
    for index, rows in enumerate(jnp.split(x, 3)):
        with drawing_for_shard(jnp.int32(index)):
            shards.append(Dropout(0.3).apply({}, rows, train=True, rngs=rngs))
    expected = Dropout(0.3).apply({}, x, train=True, rngs=rngs)
    np.testing.assert_array_equal(np.concatenate(shards), expected)


def test_dropout_needs_no_key_and_changes_nothing_in_inference_or_at_rate_zero() -> None:
    x = normal(0, 30, 40)
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x, train=False), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, train=True), x)
    with pytest.raises(InvalidRngError):
        Dropout(0.5).apply({}, x, train=True)


class TwoDropouts(nn.Module):
    """A module that applies two separate dropout modules to the same vector."""

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        return Dropout(0.5)(x, train=True), Dropout(0.5)(x, train=True)


def test_two_modules_draw_different_masks() -> None:
    rngs = {"dropout": jax.random.key(0)}
    first, second = TwoDropouts().apply({}, jnp.ones(60_000), rngs=rngs)
    assert abs(deviations(first == 0, second == 0)) < 5
    again, _ = TwoDropouts().apply({}, jnp.ones(60_000), rngs=rngs)
    np.testing.assert_array_equal(first, again)


def test_dropout_keeps_the_dtype() -> None:
    x = jnp.ones((4, 5), jnp.bfloat16)
    assert dropout(x, 0.1, jax.random.key(0)).dtype == jnp.bfloat16
