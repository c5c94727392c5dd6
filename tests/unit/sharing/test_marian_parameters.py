"""Test the conversion to Marian's layout. `tests/integration/test_parity.py` compares outputs."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from corpora import VOCABULARY
from models import SOURCE, TARGET
from oracles import SMALL_MODEL, drawn_params, sinusoid

from transformer_jax.model.build import build_transformer
from transformer_jax.sharing.marian_parameters import (
    channel_order,
    from_marian,
    has_attention_bias,
    to_marian,
)


def test_the_channels_of_marian_are_all_sines_and_then_all_cosines() -> None:
    table = sinusoid(5, 8)
    angle = np.arange(5)[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    expected = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    np.testing.assert_allclose(table[:, channel_order(8)], expected, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": "none", "output_bias": True},
        {"attention_bias": True, "layer_norm": "pre", "num_decoder_layers": 1},
    ],
)
def test_the_conversion_can_be_inverted(changes: dict[str, Any]) -> None:
    config = replace(SMALL_MODEL, **changes)
    model = build_transformer(config, VOCABULARY.sizes["vocab_size"] or 0)
    params = drawn_params(model, SOURCE, TARGET)
    arrays = to_marian(config, params, VOCABULARY)
    assert has_attention_bias(arrays) == config.attention_bias
    result = from_marian(config, arrays, VOCABULARY)
    assert jax.tree.structure(result) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, result, params)
