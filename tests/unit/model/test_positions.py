"""Test positional encodings against the formula and the claims of section 3.5."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from oracles import SMALL_MODEL, apply, drawn_params, examples, floats, normal
from oracles import sinusoid as formula

from transformer_jax.model.build import POSITIONS, build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.positions import AddLearnedPositions, AddPositions, sinusoid


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_the_sinusoid_is_the_papers_formula(d_model: int) -> None:
    expected = formula(300, d_model)
    # For angles up to 300, the float32 rounding error is about 3e-5.
    np.testing.assert_allclose(sinusoid(jnp.arange(300), d_model), expected, atol=1e-4)


def test_the_sinusoid_encodes_any_positions_in_any_order() -> None:
    positions = [7, 0, 299, 7]
    encoded = sinusoid(jnp.asarray(positions), 16)
    np.testing.assert_allclose(encoded, formula(300, 16)[positions], atol=1e-4)


@given(offset=st.integers(-50, 200))
@examples(20)
def test_the_encoding_of_a_later_position_is_a_rotation_of_an_earlier_one(offset: int) -> None:
    """Section 3.5 says that PE(pos + k) is a linear function of PE(pos) for any fixed offset k."""
    d_model, positions = 32, np.arange(60, 160)
    rotation = np.zeros((d_model, d_model))
    for i in range(0, d_model, 2):
        angle = offset / 10000 ** (i / d_model)
        rotation[i, [i, i + 1]] = math.cos(angle), math.sin(angle)
        rotation[i + 1, [i, i + 1]] = -math.sin(angle), math.cos(angle)
    earlier = floats(sinusoid(jnp.asarray(positions), d_model))
    later = floats(sinusoid(jnp.asarray(positions + offset), d_model))
    np.testing.assert_allclose(later, earlier @ rotation.T, atol=2e-4)
    assert offset == 0 or not np.allclose(later, earlier, atol=0.01)


def test_wavelengths_grow_geometrically_from_2_pi_to_almost_10000_times_2_pi() -> None:
    d_model = 512
    # The sine and cosine at position 1 determine the angle per position, and hence the wavelength.
    sines, cosines = floats(sinusoid(jnp.asarray([1]), d_model))[0].reshape(-1, 2).T
    wavelengths = 2 * math.pi / np.arctan2(sines, cosines)
    assert wavelengths[0] == pytest.approx(2 * math.pi, rel=1e-5)
    assert 0.96 * 10000 * 2 * math.pi < wavelengths[-1] < 10000 * 2 * math.pi
    np.testing.assert_allclose(wavelengths[1:] / wavelengths[:-1], 10000 ** (2 / 512), rtol=1e-5)


def test_sinusoids_are_added_to_embeddings() -> None:
    x = normal(0, 2, 4, SMALL_MODEL.d_model)
    output = apply(AddPositions(SMALL_MODEL, 9), {}, x, jnp.arange(4))
    np.testing.assert_allclose(output, floats(x) + formula(4, SMALL_MODEL.d_model), atol=1e-5)


def test_the_sum_of_embeddings_and_positions_is_dropped_out() -> None:
    x = normal(0, 4, 8, SMALL_MODEL.d_model)
    model, rng = AddPositions(SMALL_MODEL, 9), jax.random.key(1)
    still = floats(apply(model, {}, x, jnp.arange(8)))
    dropped = floats(apply(model, {}, x, jnp.arange(8), train=True, rng=rng))
    is_zero = dropped == 0
    assert 0.4 < is_zero.mean() < 0.6
    np.testing.assert_allclose(dropped[~is_zero], 2 * still[~is_zero], rtol=1e-5)


def learned(length: int, positions: list[int]) -> tuple[AddPositions, Array, Array]:
    model = AddLearnedPositions(SMALL_MODEL, length)
    return model, normal(0, 2, len(positions), 16), jnp.asarray(positions)


def test_learned_positions_are_rows_of_a_table() -> None:
    model, x, positions = learned(9, [4, 0, 8])
    params = drawn_params(model, x, positions)
    assert params["positions"].shape == (9, 16)
    expected = x + params["positions"][positions][None]
    np.testing.assert_allclose(apply(model, params, x, positions), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("init", "norm"), [("normal", 1.0), ("sinusoidal_scale", 8.0), ("sinusoids", 8.0)]
)
def test_a_learned_table_starts_at_norm_1_or_at_the_norm_of_a_sinusoid(
    init: Any, norm: float
) -> None:
    config = replace(SMALL_MODEL, d_model=128, positions="learned", learned_positions_init=init)
    model, positions = AddLearnedPositions(config, 50), jnp.arange(50)
    params: Any = model.init(jax.random.key(0), normal(0, 1, 50, 128), positions)["params"]
    table = floats(params["positions"])
    norms = np.linalg.norm(table, axis=1)
    assert norms.mean() == pytest.approx(norm, rel=0.02)
    is_sinusoid = np.allclose(table, formula(50, 128), atol=1e-4)
    assert is_sinusoid == (init == "sinusoids")
    # A sinusoid has norm sqrt(d_model / 2), whereas scaled embeddings have norm sqrt(d_model).
    assert np.linalg.norm(floats(sinusoid(positions, 128)), axis=1) == pytest.approx(8.0)


def test_a_table_of_sinusoids_is_trained() -> None:
    config = replace(SMALL_MODEL, positions="learned", learned_positions_init="sinusoids")
    x, positions = normal(0, 2, 5, 16), jnp.arange(5)
    learned_sinusoids, fixed = AddLearnedPositions(config, 9), AddPositions(config, 9)
    params = learned_sinusoids.init(jax.random.key(0), x, positions)["params"]
    np.testing.assert_allclose(
        apply(learned_sinusoids, params, x, positions), apply(fixed, {}, x, positions), atol=1e-6
    )

    def total(params: dict[str, Array]) -> Array:
        return jnp.sum(apply(learned_sinusoids, params, x, positions) ** 2)

    assert np.any(jax.grad(total)(params)["positions"])


def test_only_the_rows_that_are_read_are_trained() -> None:
    model, x, positions = learned(9, [4, 0, 8])
    params = drawn_params(model, x, positions)

    def total(params: dict[str, Array]) -> Array:
        return jnp.sum(apply(model, params, x, positions) ** 2)

    gradient = jax.grad(total)(params)["positions"]
    is_read = np.isin(np.arange(9), positions)
    np.testing.assert_array_equal(np.any(gradient, axis=1), is_read)


def test_each_stack_has_a_table_for_its_longest_sentence() -> None:
    config = replace(SMALL_MODEL, positions="learned", max_length=20)
    params = abstract_params(build_transformer(config, 11))
    assert params["source_positions"]["positions"].shape == (20, 16)
    assert params["target_positions"]["positions"].shape == (20 + 50, 16)


def test_max_positions_sets_the_length_of_both_tables() -> None:
    config = replace(SMALL_MODEL, positions="learned", max_length=20, max_positions=7)
    params = abstract_params(build_transformer(config, 11))
    assert params["source_positions"]["positions"].shape == (7, 16)
    assert params["target_positions"]["positions"].shape == (7, 16)


@pytest.mark.parametrize("side", [0, 1])
def test_too_many_positions_for_the_table_raise_a_one_line_error(side: int) -> None:
    model = build_transformer(replace(SMALL_MODEL, positions="learned", max_positions=5), 11)
    long, short = jnp.ones((1, 6), jnp.int32), jnp.ones((1, 5), jnp.int32)
    params = drawn_params(model, short, short)
    sentences = (long, short) if side == 0 else (short, long)
    with pytest.raises(
        ValueError, match=r"(?m)^6 positions, but the learned table has 5 \(.*clamp$"
    ):
        apply(model, params, *sentences)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, marks=[] if scheme == "sinusoidal" else [pytest.mark.slow])
        for scheme in sorted(set(POSITIONS) - {"learned"})
    ],
)
def test_only_learned_positions_have_tables(scheme: Any) -> None:
    params = abstract_params(build_transformer(replace(SMALL_MODEL, positions=scheme), 11))
    assert not {"source_positions", "target_positions"} & set(params)
