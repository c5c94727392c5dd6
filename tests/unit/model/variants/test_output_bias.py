"""Test the logit bias and the other options of Marian models."""

import numpy as np
import pytest
from models import SOURCE, TARGET, VOCABULARY, make_model
from oracles import apply

from transformer_jax.model.inspect import attention_weights, parameter_counts


def test_the_bias_is_added_to_the_logits_of_each_position() -> None:
    model, params = make_model(output_bias=True)
    assert params["output_bias"].shape == (VOCABULARY,)
    plain, _ = make_model()
    without = {name: x for name, x in params.items() if name != "output_bias"}
    expected = apply(plain, without, SOURCE, TARGET) + params["output_bias"][None, None]
    np.testing.assert_allclose(apply(model, params, SOURCE, TARGET), expected, atol=1e-5)


def test_a_model_without_the_bias_does_not_count_it() -> None:
    counts = [parameter_counts(make_model(output_bias=has)[0])["total"] for has in (False, True)]
    assert counts[1] - counts[0] == VOCABULARY


@pytest.mark.parametrize(("depth", "expected"), [(None, 2), (1, 1), (3, 3)])
def test_the_decoder_has_its_own_number_of_layers(depth: int | None, expected: int) -> None:
    model, params = make_model(num_layers=2, num_decoder_layers=depth)
    layers = [name for name in params if name.startswith("decoder_")]
    assert len(layers) == expected
    weights = attention_weights(model, params, SOURCE, TARGET)
    depths = {kind: len(x) for kind, x in weights.items()}
    assert depths == {"encoder": 2, "decoder": expected, "cross": expected}


def test_a_decoder_that_begins_with_padding_reads_its_embedding_first() -> None:
    model, params = make_model(decoder_start="padding")
    plain, _ = make_model()
    # This model reads padding (0) where the paper's model reads BOS (1).
    table = params["embedding"]["table"]
    swapped = {**params, "embedding": {"table": table.at[1].set(table[0])}}
    ours, expected = (apply(m, p, SOURCE, TARGET) for m, p in ((model, params), (plain, swapped)))
    # The embedding tables differ in the row for BOS, so the logits of BOS also differ.
    np.testing.assert_allclose(ours[..., 2:], expected[..., 2:], atol=1e-5)
    assert not np.allclose(ours, apply(plain, params, SOURCE, TARGET), atol=0.01)
