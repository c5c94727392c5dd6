"""Test restricted self-attention against full attention with a mask."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from models import make_self_attention
from oracles import (
    SMALL_MODEL,
    Floats,
    apply,
    drawn_params,
    multi_head_attention,
    multi_head_weights,
    normal,
)

from transformer_jax.model.masks import causal_mask

LENGTH = 7
PADDING = jnp.arange(LENGTH)[None, None, None] < jnp.asarray([7, 4])[:, None, None, None]


def is_near(window: int) -> Array:
    """Return the mask of query-key pairs at most `window` positions apart, [1, 1, T, T]."""
    positions = jnp.arange(LENGTH)
    return (jnp.abs(positions[:, None] - positions[None]) <= window)[None, None]


@pytest.mark.parametrize(
    "window",
    [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 20],
)
@pytest.mark.parametrize("mask", [PADDING, causal_mask(LENGTH)], ids=["padding", "causal"])
def test_a_window_computes_attention_with_a_mask_of_far_keys(window: int, mask: Array) -> None:
    attention = make_self_attention(replace(SMALL_MODEL, attention_window=window))
    x = normal(0, 2, LENGTH, SMALL_MODEL.d_model)
    params = drawn_params(attention, x, x, mask)
    near = mask & is_near(window)
    # A query that has no allowed keys spreads its attention evenly, but over different keys than in
    # full attention.
    has_keys = np.broadcast_to(near.any(axis=-1)[:, 0], (2, LENGTH))
    expected: Floats = multi_head_attention(params, x, x, near)
    actual = apply(attention, params, x, x, mask)
    np.testing.assert_allclose(actual[has_keys], expected[has_keys], atol=1e-5)

    _, variables = attention.apply({"params": params}, x, x, mask, mutable=["intermediates"])
    weights: Any = variables["intermediates"]
    expected = multi_head_weights(params, x, x, near).swapaxes(1, 2)[has_keys]
    actual = weights["weights"][0].swapaxes(1, 2)[has_keys]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def count_flops(window: int | None, length: int) -> float:
    """Return the FLOPs of compiled self-attention over a sequence of this length."""
    attention = make_self_attention(replace(SMALL_MODEL, attention_window=window))
    x, mask = jnp.zeros((1, length, SMALL_MODEL.d_model)), jnp.ones((1, 1, 1, length), bool)
    params = drawn_params(attention, x, x, mask)
    compiled = jax.jit(attention.apply).lower({"params": params}, x, x, mask).compile()
    cost: Any = compiled.cost_analysis()
    return cost["flops"]


def test_the_work_grows_linearly_with_the_length() -> None:
    assert 3.8 < count_flops(4, 256) / count_flops(4, 64) < 4.2


@pytest.mark.parametrize("window", [9, 1000])
def test_a_window_beyond_the_sequence_takes_at_most_three_times_the_work(window: int) -> None:
    assert count_flops(window, 16) < 3 * count_flops(None, 16)
