"""Test the positional encodings that differ from the paper's."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import SMALL_MODEL, apply, drawn_params, floats, normal

from transformer_jax.model.build import POSITIONS, build_transformer
from transformer_jax.model.variants.sub_layers import AddClampedPositions


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_concatenated_sinusoids_are_tensor2tensors(d_model: int) -> None:
    """The test follows Tensor2Tensor's get_timing_signal_1d, including its variable names."""
    length, num_timescales = 300, d_model // 2
    log_timescale_increment = math.log(1.0e4 / 1.0) / max(num_timescales - 1, 1)
    expected = np.zeros((length, d_model))
    for position in range(length):
        for i in range(num_timescales):
            inverse_timescale = 1.0 * math.exp(i * -log_timescale_increment)
            expected[position, i] = math.sin(position * inverse_timescale)
            expected[position, num_timescales + i] = math.cos(position * inverse_timescale)
    add_positions = POSITIONS["concatenated_sinusoidal"][0]
    model = add_positions(replace(SMALL_MODEL, d_model=d_model), 9)
    encoded = apply(model, {}, jnp.zeros((1, length, d_model)), jnp.arange(length))
    np.testing.assert_allclose(encoded[0], expected, atol=1e-4)


def test_a_clamped_table_returns_its_last_row_past_its_end() -> None:
    positions = jnp.asarray([0, 4, 5, 3, 60])
    model, x = AddClampedPositions(SMALL_MODEL, 5), normal(0, 2, len(positions), 16)
    params = drawn_params(model, x, positions)
    table = floats(params["positions"])
    assert table.shape == (5, 16)
    expected = floats(x) + table[[0, 4, 4, 3, 4]]
    np.testing.assert_allclose(apply(model, params, x, positions), expected, atol=1e-6)


@pytest.mark.slow
def test_clamping_changes_nothing_within_the_table() -> None:
    tokens = jnp.asarray([[3, 4, 5, 6, 2]])
    strict = build_transformer(replace(SMALL_MODEL, positions="learned", max_positions=5), 11)
    clamped = build_transformer(replace(strict.config, out_of_range_positions="clamp"), 11)
    params = drawn_params(strict, tokens, tokens)
    before, after = (apply(model, params, tokens, tokens) for model in (strict, clamped))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("scheme", ["none", "alibi", "rotary", "relative", "t5"])
def test_schemes_without_an_encoding_add_nothing_to_embeddings(scheme: Any) -> None:
    model = POSITIONS[scheme][0](SMALL_MODEL, 9)
    x = normal(0, 2, 3, 16)
    np.testing.assert_array_equal(apply(model, {}, x, jnp.arange(3)), x)
