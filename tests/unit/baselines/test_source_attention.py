"""Test the attention of the models without self-attention against a loop."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import SMALL_MODEL, attention, drawn_params, floats, normal

from transformer_jax.baselines.source_attention import Source, SourceAttention

SIZE = SMALL_MODEL.d_model
QUERIES, KEYS, VALUES = normal(0, 2, 3, SIZE), normal(1, 2, 4, SIZE), normal(2, 2, 4, SIZE)
MASK = jnp.arange(4)[None, None, None] < jnp.asarray([4, 2])[:, None, None, None]


def attend(module: SourceAttention, params: Any, mask: Any) -> Any:
    bound = module.bind({"params": params}, mutable=["intermediates"])
    return bound(QUERIES, bound.prepare(KEYS, VALUES, mask))


def make_attention(score: Any) -> tuple[SourceAttention, Any]:
    config = replace(SMALL_MODEL, architecture="rnn", attention_score=score)
    module = SourceAttention(config)
    source = Source(KEYS[:, :, None], VALUES[:, :, None], MASK)
    if score == "additive":
        prepared = drawn_params(module, KEYS, VALUES, MASK, method="prepare")
        called = drawn_params(module, QUERIES, source)
        return module, {**prepared, **called}
    return module, {}


def test_the_context_of_dot_product_attention_is_that_of_a_loop() -> None:
    module, params = make_attention("dot_product")
    query, key, value = (x[:, :, None] for x in (QUERIES, KEYS, VALUES))
    _, expected = attention(query, key, value, MASK, scale=1.0)
    np.testing.assert_allclose(attend(module, params, MASK), expected[:, :, 0], atol=1e-5)


def test_additive_attention_is_an_average_of_the_values_and_ignores_padding() -> None:
    module, params = make_attention("additive")
    assert {"query", "key"} <= set(params)
    context = floats(attend(module, params, MASK))
    values = floats(VALUES)
    # An average is between the smallest and the largest of the allowed values.
    for row, length in enumerate((4, 2)):
        low, high = (f(values[row, :length], axis=0) for f in (np.min, np.max))
        assert ((low - 1e-5 <= context[row]) & (context[row] <= high + 1e-5)).all()
    assert np.abs(context - floats(attend(module, params, jnp.ones_like(MASK))))[1].max() > 1e-3


@pytest.mark.parametrize("score", ["dot_product", "additive"])
def test_a_query_with_one_allowed_key_gets_its_value(score: str) -> None:
    module, params = make_attention(score)
    only = jnp.zeros_like(MASK).at[..., 1].set(True)
    expected = np.broadcast_to(floats(VALUES)[:, 1:2], QUERIES.shape)
    np.testing.assert_allclose(attend(module, params, only), expected, atol=1e-5)
