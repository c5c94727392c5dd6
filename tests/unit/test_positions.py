"""Positional encodings against section 3.5's formula and what the paper says of it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from oracles import SMALL, apply, drawn_params, examples, floats, normal
from oracles import sinusoid as formula
from rich.console import Console
from small import SMALL as EXPERIMENT

from transformer_jax.errors import DataError
from transformer_jax.model.embeddings import AddPositions
from transformer_jax.model.positions import POSITIONS, sinusoid
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.training.create_run import create_run


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_sinusoid_is_the_papers_formula(d_model: int) -> None:
    expected = formula(300, d_model)
    # An angle of up to 300 in float32 is known to about 3e-5.
    np.testing.assert_allclose(sinusoid(jnp.arange(300), d_model), expected, atol=1e-4)


def test_sinusoid_gives_any_positions_in_any_order() -> None:
    asked = [7, 0, 299, 7]
    encoded = sinusoid(jnp.asarray(asked), 16)
    np.testing.assert_allclose(encoded, formula(300, 16)[asked], atol=1e-4)


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_concatenated_sinusoids_are_tensor2tensors(d_model: int) -> None:
    """Its get_timing_signal_1d, with its names: all sines, then all cosines."""
    length, num_timescales = 300, d_model // 2
    log_timescale_increment = math.log(1.0e4 / 1.0) / max(num_timescales - 1, 1)
    expected = np.zeros((length, d_model))
    for position in range(length):
        for i in range(num_timescales):
            inverse_timescale = 1.0 * math.exp(i * -log_timescale_increment)
            expected[position, i] = math.sin(position * inverse_timescale)
            expected[position, num_timescales + i] = math.cos(position * inverse_timescale)
    config = replace(SMALL, positions="concatenated_sinusoidal", d_model=d_model)
    zeros = jnp.zeros((1, length, d_model))
    encoded = apply(AddPositions(config, 9), {}, zeros, jnp.arange(length))
    np.testing.assert_allclose(encoded[0], expected, atol=1e-4)


@given(offset=st.integers(-50, 200))
@examples(20)
def test_encoding_of_a_later_position_is_a_rotation_of_the_earlier(offset: int) -> None:
    """Section 3.5: for any fixed offset k, PE(pos + k) is a linear function of PE(pos)."""
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
    # At position 1, sine and cosine tell the angle of one step, and so the wavelength.
    sines, cosines = floats(sinusoid(jnp.asarray([1]), d_model))[0].reshape(-1, 2).T
    wavelengths = 2 * math.pi / np.arctan2(sines, cosines)
    assert wavelengths[0] == pytest.approx(2 * math.pi, rel=1e-5)
    assert 0.96 * 10000 * 2 * math.pi < wavelengths[-1] < 10000 * 2 * math.pi
    np.testing.assert_allclose(wavelengths[1:] / wavelengths[:-1], 10000 ** (2 / 512), rtol=1e-5)


def learned(length: int, positions: list[int]) -> tuple[AddPositions, Array, Array]:
    config = replace(SMALL, positions="learned")
    return AddPositions(config, length), normal(0, 2, len(positions), 16), jnp.asarray(positions)


def test_learned_positions_are_rows_of_a_table() -> None:
    model, x, positions = learned(9, [4, 0, 8])
    params = drawn_params(model, x, positions)
    assert params["positions"].shape == (9, 16)
    expected = x + params["positions"][positions]
    np.testing.assert_allclose(apply(model, params, x, positions), expected, atol=1e-6)


def test_rows_of_the_table_that_are_used_are_trained() -> None:
    model, x, positions = learned(9, [4, 0, 8])
    params = drawn_params(model, x, positions)

    def total(params: dict[str, Array]) -> Array:
        return jnp.sum(apply(model, params, x, positions) ** 2)

    gradient = jax.grad(total)(params)["positions"]
    used = np.isin(np.arange(9), positions)
    np.testing.assert_array_equal(np.any(gradient, axis=1), used)


def test_each_stack_has_a_table_as_long_as_its_sentences() -> None:
    config = replace(SMALL, positions="learned", max_length=20)
    params = abstract_params(Transformer(config, 11))
    assert params["source_positions"]["positions"].shape == (20, 16)
    assert params["target_positions"]["positions"].shape == (20 + 50, 16)


def test_a_table_has_the_length_that_is_asked_for() -> None:
    config = replace(SMALL, positions="learned", max_length=20, max_positions=7)
    params = abstract_params(Transformer(config, 11))
    assert params["source_positions"]["positions"].shape == (7, 16)
    assert params["target_positions"]["positions"].shape == (7, 16)


def test_a_place_past_a_clamped_table_has_its_last_vector() -> None:
    config = replace(SMALL, positions="learned", out_of_range_positions="clamp")
    model, asked = AddPositions(config, 5), [0, 4, 5, 3, 60]
    x = normal(0, 2, len(asked), 16)
    params = drawn_params(model, x, jnp.asarray(asked))
    table = floats(params["positions"])
    assert table.shape == (5, 16)
    expected = floats(x) + table[[0, 4, 4, 3, 4]]
    found = apply(model, params, x, jnp.asarray(asked))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_within_its_table_clamping_changes_no_bit() -> None:
    pieces = jnp.asarray([[3, 4, 5, 6, 2]])
    strict = Transformer(replace(SMALL, positions="learned", max_positions=5), 11)
    clamped = Transformer(replace(strict.config, out_of_range_positions="clamp"), 11)
    params = drawn_params(strict, pieces, pieces)
    before, after = (apply(model, params, pieces, pieces) for model in (strict, clamped))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("side", [0, 1])
def test_more_places_than_the_table_has_are_refused_in_one_line(side: int) -> None:
    model = Transformer(replace(SMALL, positions="learned", max_positions=5), 11)
    long, short = jnp.ones((1, 6), jnp.int32), jnp.ones((1, 5), jnp.int32)
    params = drawn_params(model, short, short)
    pieces = (long, short) if side == 0 else (short, long)
    with pytest.raises(ValueError, match=r"(?m)^6 positions, and a learned .* has 5 \(.*clamp$"):
        apply(model, params, *pieces)


def test_a_set_that_is_longer_than_the_tables_is_refused_before_training(tmp_path: Path) -> None:
    table = {"positions": "learned", "max_positions": 25}
    config = EXPERIMENT.change(model=table, data={"max_length": 25})
    cure = "raise model.max_length and model.max_positions, or choose model.out_of_range_positions clamp"
    told = rf"^a source of dev has \d+ pieces, and the model reads 25: {cure}$"
    with pytest.raises(DataError, match=told):
        create_run(config, tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run").exists()
    clamped = config.change(model={"out_of_range_positions": "clamp"})
    assert create_run(clamped, tmp_path / "run", Console(quiet=True)).config.model == clamped.model


@pytest.mark.parametrize("scheme", sorted(set(POSITIONS) - {"learned"}))
def test_other_schemes_have_no_tables(scheme: Any) -> None:
    params = abstract_params(Transformer(replace(SMALL, positions=scheme), 11))
    assert not {"source_positions", "target_positions"} & set(params)


@pytest.mark.parametrize("scheme", ["none", "alibi", "rotary", "relative"])
def test_no_positions_and_those_of_self_attention_add_nothing(scheme: Any) -> None:
    model = AddPositions(replace(SMALL, positions=scheme), 9)
    x = normal(0, 2, 3, 16)
    np.testing.assert_array_equal(apply(model, {}, x, jnp.arange(3)), x)
