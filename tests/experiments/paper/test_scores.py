"""Test the comparison of additive and dot-product attention."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper.scores import NUM_HEADS, SCORES, Attention, measure_scores, summarize


def largest_array(score: str, n: int, d_k: int) -> int:
    """Return the number of elements of the largest array in the traced program."""
    layer, x = Attention(score), jax.ShapeDtypeStruct((1, n, NUM_HEADS, d_k), jnp.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    closed = jax.make_jaxpr(layer.apply)(params, x)

    def sizes(jaxpr: Any) -> Iterator[int]:
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for value in equation.params.values():
                if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                    yield from sizes(inner)

    return max(sizes(closed.jaxpr))


def test_only_additive_attention_has_a_vector_for_each_pair_of_positions() -> None:
    """Section 3.2.1: dot-product attention is faster and more space-efficient in practice."""
    n, d_k = 64, 32
    assert largest_array("scaled_dot_product", n, d_k) == NUM_HEADS * n * n
    assert largest_array("additive", n, d_k) == NUM_HEADS * n * n * d_k


def test_the_table_compares_both_scores_for_each_size() -> None:
    measurements = measure_scores([8, 16], [4])
    assert [(x.score, x.n, x.d_k) for x in measurements] == [
        (score, n, 4) for n in (8, 16) for score in SCORES
    ]
    assert all(x.seconds > 0 and x.bytes > 0 for x in measurements)
    head, *rows = summarize(measurements)
    assert [row[:2] for row in rows] == [["8", "4"], ["16", "4"]]
    assert {len(row) for row in rows} == {len(head)}


@pytest.mark.parametrize("score", ["scaled_dot_product", "additive"])
def test_the_measured_layer_is_attention(score: str) -> None:
    x = jax.random.normal(jax.random.key(0), (1, 5, NUM_HEADS, 4))
    layer = Attention(score)
    params = layer.init(jax.random.key(1), x)
    if score == "additive":
        [vector] = jax.tree.leaves(params)
        logits = jnp.tanh(x[:, :, None] + x[:, None]) * vector[None, None, None]
        scores = jnp.moveaxis(logits.sum(-1), 3, 1)
    else:
        scores = jnp.einsum("bthk,bshk->bhts", x, x) / 2
    weights = jax.nn.softmax(scores)
    expected = jnp.einsum("bhts,bshk->bthk", weights, x)
    np.testing.assert_allclose(np.asarray(layer.apply(params, x)), expected, atol=1e-5)
