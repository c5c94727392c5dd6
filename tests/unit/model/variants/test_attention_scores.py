"""Test each parameterized attention score against its formula, one query-key pair at a time."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from oracles import SMALL_MODEL, Floats, apply, drawn_params, floats, initial_params, normal

from transformer_jax.model.attention import dot_product
from transformer_jax.model.build import SCORES
from transformer_jax.model.variants.sub_layers import Additive, General, additive

HEADS, WIDTH = 3, 4
CONFIG = replace(SMALL_MODEL, num_heads=HEADS, d_k=WIDTH)
QUERY, KEY = normal(0, 2, 5, HEADS, WIDTH), normal(1, 2, 6, HEADS, WIDTH)


def general_in_loops(params: Any, head: int, query: Floats, key: Floats) -> float:
    """Return q^T W k, the "general" score of Luong et al."""
    matrix = floats(params["matrix"])[head]
    return sum(query[i] * matrix[i, j] * key[j] for i in range(WIDTH) for j in range(WIDTH))


def additive_in_loops(params: Any, head: int, query: Floats, key: Floats) -> float:
    """Return v^T tanh(W s + U h), the score of Bahdanau et al., given W s and U h."""
    vector = floats(params["vector"])[head]
    return sum(vector[i] * math.tanh(query[i] + key[i]) for i in range(WIDTH))


@pytest.mark.parametrize(
    ("name", "formula"), [("general", general_in_loops), ("additive", additive_in_loops)]
)
def test_a_score_equals_its_formula(name: str, formula: Any) -> None:
    score: Any = SCORES[name](CONFIG)
    params = drawn_params(score, QUERY, KEY)
    expected = np.zeros((2, HEADS, 5, 6))
    for b, h, t, s in np.ndindex(*expected.shape):
        expected[b, h, t, s] = formula(params, h, floats(QUERY)[b, t, h], floats(KEY)[b, s, h])
    np.testing.assert_allclose(apply(score, params, QUERY, KEY), expected, atol=1e-5)


def test_the_general_score_with_an_identity_matrix_is_the_dot_product() -> None:
    params = {"matrix": jnp.broadcast_to(jnp.eye(WIDTH), (HEADS, WIDTH, WIDTH))}
    expected = dot_product(QUERY, KEY)
    np.testing.assert_allclose(apply(General(), params, QUERY, KEY), expected, atol=1e-6)


def test_the_matrix_of_each_head_starts_glorot_uniform_by_itself() -> None:
    x = normal(0, 1, 1, 8, 32)
    matrix = np.asarray(initial_params(General(), x, x)["matrix"])
    bound = math.sqrt(6 / (32 + 32))
    assert matrix.shape == (8, 32, 32)
    assert 0.99 * bound < np.abs(matrix).max() <= bound


def test_additive_scores_of_bfloat16_vectors_are_summed_in_float32() -> None:
    query, key = (x.astype(jnp.bfloat16) for x in (QUERY, KEY))
    params = drawn_params(Additive(), QUERY, KEY)
    scores = apply(Additive(), params, query, key)
    assert scores.dtype == jnp.float32
    expected = apply(Additive(), params, *(x.astype(jnp.float32) for x in (query, key)))
    np.testing.assert_array_equal(scores, expected)


def test_additive_scores_of_float64_vectors_are_not_rounded_to_float32() -> None:
    with jax.enable_x64(True):
        query, key, vector = (jnp.asarray(floats(x)) for x in (QUERY, KEY, normal(2, HEADS, WIDTH)))
        scores = additive(query, key, vector)
    sums = floats(query)[:, :, None] + floats(key)[:, None]
    expected = np.einsum("btshk,hk->bhts", np.tanh(sums), floats(vector))
    np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-12)


def test_additive_stores_no_array_of_all_pairs_and_components_for_its_gradient() -> None:
    vector = normal(2, HEADS, WIDTH)

    def total(query: Array, key: Array, vector: Array) -> Array:
        return jnp.sum(additive(query, key, vector) ** 2)

    _, backward = jax.vjp(total, QUERY, KEY, vector)
    stored = [leaf.size for leaf in jax.tree.leaves(backward)]
    # No array that is stored for the backward pass is larger than the scores.
    assert max(stored) <= 2 * HEADS * 5 * 6
