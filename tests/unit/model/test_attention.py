"""Test attention against loops that implement its equation, and against claims in section 3.2."""

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
from models import make_self_attention
from oracles import (
    SMALL_MODEL,
    apply,
    attention,
    coins,
    drawn_params,
    examples,
    initial_params,
    multi_head_attention,
    normal,
)

from transformer_jax.model.attention import (
    dot_product,
    masked_softmax,
    scaled_dot_product,
    weighted_sum,
)
from transformer_jax.model.build import SCORES

DOT_PRODUCTS = {"scaled_dot_product": scaled_dot_product, "dot_product": dot_product}


def attend(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """Implement equation 1 with the package's own functions."""
    scores = scaled_dot_product(query, key)
    return weighted_sum(masked_softmax(scores, mask), value)


@pytest.mark.parametrize("score", DOT_PRODUCTS)
@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 5), (2, 1, 1, 5)])
@given(seed=st.integers(0, 10_000))
@examples(5)
def test_attention_is_equation_1(score: str, mask_shape: tuple[int, ...], seed: int) -> None:
    query, key = normal(seed, 2, 4, 3, 6), normal(seed + 1, 2, 5, 3, 6)
    value = normal(seed + 2, 2, 5, 3, 7)
    mask = coins(seed, 0.6, *mask_shape)

    weights = masked_softmax(DOT_PRODUCTS[score](query, key), mask)
    output = weighted_sum(weights, value)

    scale = {"scaled_dot_product": 1 / math.sqrt(6), "dot_product": 1.0}[score]
    expected_weights, expected = attention(query, key, value, mask, scale=scale)
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_the_config_offers_all_scores() -> None:
    """test_attention_scores.py tests the other two score functions."""
    assert set(SCORES) == {*DOT_PRODUCTS, "general", "additive"}
    assert {name: SCORES[name](SMALL_MODEL) for name in DOT_PRODUCTS} == DOT_PRODUCTS


def test_a_masked_key_has_weight_zero() -> None:
    mask = coins(1, 0.5, 2, 3, 5, 7).at[..., 0].set(True)
    weights = masked_softmax(100 * normal(0, 2, 3, 5, 7), mask)
    assert not np.any(np.asarray(weights)[~np.asarray(mask)])
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


def test_a_query_without_allowed_keys_attends_evenly() -> None:
    mask = jnp.ones((1, 1, 3, 5), bool).at[:, :, 1].set(False)
    weights = masked_softmax(50 * normal(0, 2, 2, 3, 5), mask)
    np.testing.assert_allclose(weights[:, :, 1], 1 / 5, atol=1e-7)
    assert not np.allclose(weights[:, :, 0], 1 / 5, atol=0.1)


def test_a_query_without_allowed_keys_has_a_finite_gradient() -> None:
    mask = jnp.ones((1, 1, 3, 5), bool).at[:, :, 1].set(False)

    def total(query: Array, key: Array, value: Array) -> Array:
        return jnp.sum(attend(query, key, value, mask) ** 2)

    arrays = normal(0, 2, 3, 2, 4), normal(1, 2, 5, 2, 4), normal(2, 2, 5, 2, 4)
    for gradient in jax.grad(total, argnums=(0, 1, 2))(*arrays):
        assert np.all(np.isfinite(gradient))
        assert np.any(gradient)
    # A query with no allowed keys attends uniformly to all keys, regardless of the scores, so its
    # gradient is zero.
    query_gradient = jax.grad(total)(*arrays)
    assert not np.any(query_gradient[:, 1])
    assert np.all(np.any(query_gradient[:, [0, 2]], axis=-1))


@pytest.mark.parametrize("d_k", [4, 64, 256])
def test_scaling_brings_the_variance_of_scores_from_d_k_to_one(d_k: int) -> None:
    """Footnote 4: if the components of q and k have mean 0 and variance 1, q.k has variance d_k."""
    pairs = 20_000
    query, key = normal(0, pairs, 1, 1, d_k), normal(1, pairs, 1, 1, d_k)
    # The relative standard error of the variance estimate is about 1%.
    np.testing.assert_allclose(np.var(dot_product(query, key)), d_k, rtol=0.06)
    np.testing.assert_allclose(np.var(scaled_dot_product(query, key)), 1.0, rtol=0.06)


@pytest.mark.parametrize("score", DOT_PRODUCTS)
def test_scores_of_bfloat16_vectors_are_summed_in_float32(score: str) -> None:
    query, key = (5 * normal(seed, 1, 4, 1, 64).astype(jnp.bfloat16) for seed in (0, 1))
    in_float32 = [x.astype(jnp.float32) for x in (query, key)]
    scores, expected = DOT_PRODUCTS[score](query, key), DOT_PRODUCTS[score](*in_float32)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    # Rounding the scores to bfloat16 would change them.
    assert not np.allclose(expected.astype(jnp.bfloat16).astype(jnp.float32), expected, rtol=1e-4)


def test_softmax_of_bfloat16_scores_is_computed_in_float32() -> None:
    keys = 3000
    scores = jnp.zeros((1, 1, 1, keys), jnp.bfloat16)
    weights = masked_softmax(scores, jnp.ones((1, 1, 1, keys), bool))
    assert weights.dtype == jnp.float32
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
    # In bfloat16, every weight has the same rounding error, so the errors add up.
    assert abs(float(jax.nn.softmax(scores).astype(jnp.float32).sum()) - 1.0) > 1e-3


def test_a_weighted_sum_has_the_dtype_of_the_values() -> None:
    weights = jnp.full((1, 1, 1, 2), 0.5)
    assert weighted_sum(weights, jnp.ones((1, 2, 1, 3), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("score", DOT_PRODUCTS)
def test_multi_head_attention_concatenates_its_heads(bias: bool, score: str) -> None:
    changes: dict[str, Any] = {"attention_bias": bias, "attention_score": score}
    config = replace(SMALL_MODEL, d_model=6, num_heads=3, d_k=4, d_v=5, **changes)
    x, memory = normal(0, 2, 4, 6), normal(1, 2, 6, 6)
    mask = coins(2, 0.7, 2, 1, 4, 6)
    model = make_self_attention(config)
    params = drawn_params(model, x, memory, mask)
    assert all(("bias" in projection) is bias for projection in params.values())

    output = apply(model, params, x, memory, mask)

    scale = 1.0 if score == "dot_product" else None
    expected = multi_head_attention(params, x, memory, mask, scale=scale)
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_a_pass_with_intermediates_returns_the_weights_of_every_head() -> None:
    config = replace(SMALL_MODEL, num_heads=3)
    x, memory = normal(0, 2, 4, 16), normal(1, 2, 5, 16)
    mask = jnp.ones((1, 1, 1, 5), bool)
    model = make_self_attention(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, memory, mask))
    assert set(shapes) == {"params"}
    params = drawn_params(model, x, memory, mask)

    output, variables = apply(model, params, x, memory, mask, mutable=("intermediates",))
    (weights,) = variables["intermediates"]["weights"]
    assert weights.shape == (2, 3, 4, 5)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    assert not np.allclose(weights[:, 0], weights[:, 1])

    np.testing.assert_array_equal(apply(model, params, x, memory, mask), output)


def test_projections_start_glorot_uniform_as_one_matrix_of_all_heads() -> None:
    """If each head were initialized separately, the bounds of the distribution would be wider."""
    d_model, heads, d_k, d_v = 64, 8, 16, 24
    config = replace(SMALL_MODEL, d_model=d_model, num_heads=heads, d_k=d_k, d_v=d_v)
    x, mask = normal(0, 1, 2, d_model), jnp.ones((1, 1, 1, 2), bool)
    params = initial_params(make_self_attention(config), x, x, mask)
    for name, width in (("query", d_k), ("key", d_k), ("value", d_v), ("output", d_v)):
        bound = math.sqrt(6 / (d_model + heads * width))
        kernel = np.asarray(params[name]["kernel"])
        assert kernel.size == d_model * heads * width
        assert 0.995 * bound < np.abs(kernel).max() <= bound, name
        # The distribution is uniform between -bound and bound.
        assert np.std(kernel) == pytest.approx(bound / math.sqrt(3), rel=0.03), name


def test_attention_dropout_drops_weights_only_when_training() -> None:
    config = replace(SMALL_MODEL, attention_dropout=0.5)
    x, mask = normal(0, 2, 4, 16), jnp.ones((1, 1, 1, 4), bool)
    model = make_self_attention(config)
    params = drawn_params(model, x, x, mask)
    plain = apply(model, params, x, x, mask)
    without = apply(make_self_attention(SMALL_MODEL), params, x, x, mask, train=True)
    dropped = apply(model, params, x, x, mask, train=True, rng=jax.random.key(1))
    np.testing.assert_array_equal(plain, without)
    assert not np.allclose(plain, dropped, atol=0.01)
