"""Test the functions that return attention weights, parameter shapes, and parameter counts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from model_variants import cases
from models import SOURCE, TARGET, VOCABULARY, make_model
from oracles import SMALL_MODEL, activations, floats, multi_head_weights, sinusoid

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.errors import UsageError
from transformer_jax.model.build import POSITIONS, SCORES, build_transformer
from transformer_jax.model.encoder_decoder import init_params, shift_right
from transformer_jax.model.inspect import (
    abstract_params,
    attention_weights,
    check_params,
    initial_position_table,
    parameter_counts,
    position_table,
)
from transformer_jax.model.masks import causal_mask, source_mask
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.step import init_state


def all_weights(model: Transformer, params: dict[str, Any]) -> dict[str, Array]:
    return jax.jit(attention_weights, static_argnums=0)(model, params, SOURCE, TARGET)


def test_attention_weights_contains_every_layer_of_each_kind() -> None:
    model, params = make_model(num_layers=2, num_heads=3)
    weights = all_weights(model, params)
    shapes = {kind: array.shape for kind, array in weights.items()}
    assert shapes == {
        "encoder": (2, 2, 3, 6, 6),
        "decoder": (2, 2, 3, 5, 5),
        "cross": (2, 2, 3, 5, 6),
    }
    for kind, array in weights.items():
        np.testing.assert_allclose(array.sum(-1), 1.0, atol=1e-5, err_msg=kind)
        assert not np.allclose(array[0], array[1], atol=0.01), "layers must differ"
    # The attention weights of padding and of future positions are zero.
    for kind in ("encoder", "cross"):
        assert not np.any(weights[kind][:, 1, ..., 4:])
        assert np.all(weights[kind][:, 1, ..., :4])
    decoder = floats(weights["decoder"])
    is_past = np.broadcast_to(np.tril(np.ones((5, 5), bool)), decoder.shape)
    np.testing.assert_array_equal(decoder > 0, is_past)


def test_the_first_layers_attend_to_embeddings_plus_positions() -> None:
    model, params = make_model()
    weights = all_weights(model, params)
    table = floats(params["embedding"]["table"])
    for stack, tokens, mask in (
        ("encoder", SOURCE, source_mask(SOURCE)),
        ("decoder", shift_right(TARGET), causal_mask(TARGET.shape[1])),
    ):
        x = table[np.asarray(tokens)] * math.sqrt(SMALL_MODEL.d_model)
        x += sinusoid(tokens.shape[1], SMALL_MODEL.d_model)
        expected = multi_head_weights(params[f"{stack}_0"]["self_attention"], x, x, mask)
        np.testing.assert_allclose(weights[stack][0], expected, atol=1e-5)


def test_each_decoder_layer_attends_to_the_memory_as_in_the_formulas() -> None:
    model, params = make_model(num_layers=2, num_heads=3)
    expected = activations(params, SOURCE, TARGET)["cross"]
    np.testing.assert_allclose(all_weights(model, params)["cross"], expected, atol=1e-5)


VARIANTS = [
    *({"positions": positions} for positions in POSITIONS),
    *({"attention_score": score} for score in SCORES if score != "scaled_dot_product"),
    {"attention_score": "additive", "positions": "alibi"},
    {"attention_score": "dot_product", "positions": "relative"},
]


FAST = [
    {"positions": "sinusoidal"},
    {"attention_score": "additive", "positions": "alibi"},
]


@pytest.mark.parametrize("changes", cases(VARIANTS, FAST))
def test_capturing_weights_changes_no_bit_of_the_logits(changes: dict[str, Any]) -> None:
    model, params = make_model(**changes)
    logits = model.apply({"params": params}, SOURCE, TARGET)
    captured, variables = model.apply({"params": params}, SOURCE, TARGET, mutable=["intermediates"])
    np.testing.assert_array_equal(captured, logits)
    sown = jax.tree.leaves(variables["intermediates"])
    # There is one array for each kind of attention: encoder self-attention, decoder self-attention,
    # and cross-attention.
    assert len(sown) == 3
    for weights in sown:
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("changes", [{"remat": True}, {"attention_implementation": "blockwise"}])
def test_remat_and_the_implementation_do_not_change_the_weights(changes: dict[str, Any]) -> None:
    model, params = make_model()
    other, _ = make_model(**changes)
    expected = all_weights(model, params)
    for kind, weights in all_weights(other, params).items():
        np.testing.assert_allclose(weights, expected[kind], atol=1e-6)


def test_abstract_parameters_have_the_shapes_and_dtypes_of_real_ones() -> None:
    model, _ = make_model()
    actual = jax.tree.map(lambda x: (x.shape, x.dtype), init_params(model, jax.random.key(0)))
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(model))
    assert actual == expected


def test_abstract_parameters_take_no_memory() -> None:
    # This model's embedding matrix would take 32 TiB.
    leaves = jax.tree.leaves(abstract_params(build_transformer(ModelConfig(d_model=2**19), 2**24)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert max(math.prod(leaf.shape) for leaf in leaves) == 2**43


def test_parameters_are_float32_in_any_compute_dtype() -> None:
    model, _ = make_model(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(model))} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize(("positions", "layer_norm"), [("sinusoidal", "post"), ("learned", "pre")])
def test_parameter_counts_list_each_kind_and_add_up(positions: str, layer_norm: str) -> None:
    changes = {"positions": positions, "layer_norm": layer_norm}
    model, params = make_model(**changes, num_layers=2, num_heads=3, d_k=4, d_v=5)
    counts = parameter_counts(model)
    attention, feed_forward, norm = 16 * 3 * (4 + 4 + 5 + 5), 2 * 16 * 32 + 32 + 16, 2 * 16
    expected = {
        "embedding": VOCABULARY * 16,
        "encoder.self_attention": 2 * attention,
        "encoder.feed_forward": 2 * feed_forward,
        "encoder.norms": 2 * 2 * norm,
        "decoder.self_attention": 2 * attention,
        "decoder.cross_attention": 2 * attention,
        "decoder.feed_forward": 2 * feed_forward,
        "decoder.norms": 2 * 3 * norm,
    }
    if positions == "learned":
        expected |= {"source_positions": 32 * 16, "target_positions": (32 + 50) * 16}
    if layer_norm == "pre":
        expected |= {"encoder_norm": norm, "decoder_norm": norm}
    total = counts.pop("total")
    assert counts == expected
    assert total == sum(counts.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_the_table_of_positions_is_what_the_encoder_adds(positions: str) -> None:
    model, params = make_model(positions=positions)
    expected = {
        "sinusoidal": sinusoid(5, SMALL_MODEL.d_model),
        "learned": floats(params.get("source_positions", {}).get("positions", []))[:5],
        "rotary": np.zeros((5, SMALL_MODEL.d_model)),
    }
    np.testing.assert_allclose(position_table(model, params, 5), expected[positions], atol=1e-6)


def test_the_decoder_has_a_table_of_its_own_positions() -> None:
    model, params = make_model(positions="learned")
    table = position_table(model, params, 5, "decoder")
    np.testing.assert_array_equal(table, floats(params["target_positions"]["positions"])[:5])


def test_the_initial_table_is_that_of_a_run_with_the_same_seed() -> None:
    model, _ = make_model(positions="learned")
    initial = init_state(model, TrainConfig(seed=3)).params["source_positions"]["positions"]
    np.testing.assert_array_equal(initial_position_table(model, 3, 5), initial[:5])
    assert not np.array_equal(initial_position_table(model, 4, 5), initial[:5])


def test_foreign_parameters_must_be_those_of_the_model() -> None:
    model, params = make_model()
    check_params(model, params)
    attention = params["encoder_0"]["self_attention"]

    def change(**parts: Any) -> dict[str, Any]:
        return {**params, "encoder_0": {**params["encoder_0"], **parts}}

    # Flax would ignore a bias that the model does not have.
    bias = {**attention, "query": {**attention["query"], "bias": jnp.ones((2, 8))}}
    name = "encoder_0.self_attention.query.bias"
    with pytest.raises(UsageError, match=rf"the model has no parameter {name}"):
        check_params(model, change(self_attention=bias))
    with pytest.raises(UsageError, match="the model has no parameter extra"):
        check_params(model, {**params, "extra": jnp.ones(1)})
    missing = {key: x for key, x in attention.items() if key != "value"}
    with pytest.raises(
        UsageError, match=r"the parameter encoder_0\.self_attention\.value\S* is missing"
    ):
        check_params(model, change(self_attention=missing))
    table = {"table": params["embedding"]["table"][:-1]}
    with pytest.raises(UsageError, match=r"parameter embedding\.table has the shape \(12, 16\)"):
        check_params(model, {**params, "embedding": table})
