"""Test cuDNN attention against full attention."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from models import make_self_attention
from oracles import SMALL_MODEL, apply, drawn_params, floats, normal


@pytest.mark.parametrize(("length", "num_kv_heads"), [(5, None), (6, 1)])
def test_cudnn_gets_even_lengths_and_gives_the_output_of_full_attention(
    length: int, num_kv_heads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN requires a GPU, so this test uses JAX's own implementation instead."""
    lengths = []
    reference: Any = jax.nn.dot_product_attention

    def attend(query: Array, key: Array, *arrays: Array, **options: Any) -> Array:
        lengths.extend([query.shape[1], key.shape[1]])
        assert options["implementation"] == "cudnn"
        options["implementation"] = "xla"
        return reference(query, key, *arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    config = replace(SMALL_MODEL, dtype="bfloat16", num_kv_heads=num_kv_heads)
    config = replace(config, attention_score="dot_product")
    x, memory = normal(0, 2, length, 16), normal(1, 2, 7, 16)
    mask = jnp.arange(7)[None, None, None] < jnp.asarray([7, 4])[:, None, None, None]
    model = make_self_attention(config)
    other = make_self_attention(replace(config, attention_implementation="cudnn"))
    params = drawn_params(model, x, memory, mask)
    expected = floats(apply(model, params, x, memory, mask))
    output = floats(apply(other, params, x, memory, mask))
    assert lengths == [6, 8]
    np.testing.assert_allclose(output, expected, atol=0.02 * np.abs(expected).max())
