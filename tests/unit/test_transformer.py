"""The whole model: against its equations, and for what may and may not have an influence."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jaxtyping import Array
from oracles import (
    SMALL,
    Wandering,
    apply,
    drawn_params,
    floats,
    multi_head_weights,
    normal,
    sinusoid,
    transformer,
)

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.losses import cross_entropy
from transformer_jax.model.transformer import (
    Transformer,
    abstract_params,
    attention_weights,
    causal_mask,
    init_params,
    parameter_counts,
    shift_right,
    source_mask,
)
from transformer_jax.special_tokens import BOS, EOS, PAD

VOCABULARY = 13
SOURCE = jnp.asarray([[5, 9, 3, 12, 7, EOS], [4, 11, 6, EOS, PAD, PAD]])
TARGET = jnp.asarray([[8, 3, 10, 5, EOS], [12, 4, EOS, PAD, PAD]])


def small(**changes: Any) -> tuple[Transformer, dict[str, Any]]:
    """Return a model of one layer a stack that differs so from `SMALL`, and parameters for it."""
    config = replace(replace(SMALL, num_layers=1), **changes)
    model = Transformer(config, VOCABULARY)
    return model, drawn_params(model, SOURCE, TARGET)


def test_the_model_is_its_equations() -> None:
    model, params = small(num_layers=2, num_heads=3, d_k=4, d_v=5)
    expected = transformer(params, SOURCE, TARGET)
    np.testing.assert_allclose(apply(model, params, SOURCE, TARGET), expected, atol=1e-4)


def test_masks_allow_tokens_and_the_past() -> None:
    assert source_mask(SOURCE)[:, 0, 0].tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    allowed = causal_mask(3)[0, 0].tolist()
    assert allowed == [[True, False, False], [True, True, False], [True, True, True]]


def test_shifting_right_begins_the_sentence_and_loses_the_last_piece() -> None:
    shifted = shift_right(jnp.asarray([[8, 3, EOS], [7, EOS, PAD]]))
    assert shifted.tolist() == [[BOS, 8, 3], [BOS, 7, EOS]]


# Decoding


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"positions": "learned"},
        {"positions": "none", "attention_score": "dot_product"},
        {"num_heads": 3, "d_k": 4, "d_v": 5, "attention_bias": True},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_decoding_step_by_step_gives_the_logits_of_the_whole(changes: dict[str, Any]) -> None:
    model, params = small(**changes)
    hypotheses, length = 3, 6
    generator = np.random.default_rng(0)
    targets = generator.integers(3, VOCABULARY, (len(SOURCE), hypotheses, length))
    flat = jnp.asarray(targets.reshape(-1, length))
    whole = apply(model, params, jnp.repeat(SOURCE, hypotheses, axis=0), flat)
    whole = floats(whole).reshape(*targets.shape, VOCABULARY)

    state = apply(
        model, params, SOURCE, hypotheses=hypotheses, max_length=length + 2, method="start"
    )
    read = shift_right(flat).reshape(targets.shape)
    beam = Wandering(len(SOURCE), hypotheses, length + 2)
    tolerance = 0.3 if model.config.dtype == "bfloat16" else 1e-4
    for t in range(length):
        arguments = beam.to_rows(t, read[..., t]), jnp.asarray(t), beam.ancestors(t), state
        logits, state = apply(model, params, *arguments, method="step")
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(beam.from_rows(t, logits), whole[:, :, t], atol=tolerance)
    # The hypotheses do differ, and by more than the tolerance.
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 4 * tolerance


# What may have an influence, and what may not


def test_no_position_sees_the_future() -> None:
    """By gradients: of the logits at each position, for the embedding that each one reads."""
    model, params = small()
    memory = normal(0, 1, 4, SMALL.d_model)
    decoder_input = shift_right(TARGET[:1])
    length = decoder_input.shape[1]

    def logits(change: Array) -> Array:
        def add_change(
            embed: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            output = embed(*args, **kwargs)
            return output + change if context.method_name == "embed" else output

        with nn.intercept_methods(add_change):
            return model.apply(
                {"params": params},
                decoder_input,
                memory,
                jnp.ones((1, 1, 1, 4), bool),
                method="decode",
            )[0]

    jacobian = jax.jit(jax.jacobian(logits))(jnp.zeros((1, length, SMALL.d_model)))
    # [position of the logits, piece, 1, position that is read, d_model]
    sees = np.any(floats(jacobian)[:, :, 0], axis=(1, 3))
    np.testing.assert_array_equal(sees, np.tril(np.ones((length, length), bool)))


def test_a_prediction_depends_on_earlier_pieces_only() -> None:
    model, params = small()
    before = apply(model, params, SOURCE, TARGET)
    for t in range(TARGET.shape[1] - 1):
        changed = TARGET.at[:, t:].set(6)
        after = apply(model, params, SOURCE, changed)
        # The piece at t is read at t + 1: up to t, nothing may change, its own logits included.
        np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert not np.allclose(after[:, t + 1], before[:, t + 1], atol=0.01)


def test_every_position_of_the_source_matters_to_every_prediction() -> None:
    model, params = small()
    before = apply(model, params, SOURCE, TARGET)
    for s in range(SOURCE.shape[1]):
        after = apply(model, params, SOURCE.at[0, s].set(10), TARGET)
        assert np.all(np.abs(floats(after - before)[0]).max(axis=-1) > 1e-4), s
        np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_padding_has_no_influence(positions: str) -> None:
    model, params = small(positions=positions)
    before = apply(model, params, SOURCE, TARGET)
    padded_source = jnp.pad(SOURCE, ((0, 0), (0, 3)))
    padded_target = jnp.pad(TARGET, ((0, 0), (0, 2)))
    after = apply(model, params, padded_source, padded_target)
    np.testing.assert_allclose(after[:, : TARGET.shape[1]], before, atol=1e-5)
    # A token in the same place has.
    other = apply(model, params, padded_source.at[:, SOURCE.shape[1]].set(7), padded_target)
    assert not np.allclose(other[:, : TARGET.shape[1]], before, atol=0.01)


def test_what_stands_in_a_padded_place_of_the_source_does_not_reach_the_tokens() -> None:
    """The memory of padding is finite, and nobody looks at it."""
    model, params = small()
    memory = apply(model, params, SOURCE, method="encode")
    assert np.all(np.isfinite(memory))
    decoder_input = shift_right(TARGET)
    mask = source_mask(SOURCE)
    is_padding = (SOURCE == PAD)[..., None]
    changed = jnp.where(is_padding, 100 * normal(0, *memory.shape), memory)
    before, after = (
        apply(model, params, decoder_input, m, mask, method="decode") for m in (memory, changed)
    )
    np.testing.assert_array_equal(before, after)


def test_a_batch_of_padding_alone_stays_finite() -> None:
    model, params = small()
    assert np.all(np.isfinite(apply(model, params, SOURCE * 0, TARGET * 0)))


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
def test_only_positions_tell_the_order_of_the_source(positions: str) -> None:
    model, params = small(positions=positions)
    order = jnp.asarray([3, 0, 5, 1, 4, 2])
    memory = apply(model, params, SOURCE[:1], method="encode")
    shuffled = apply(model, params, SOURCE[:1, order], method="encode")
    is_the_same = np.allclose(shuffled, memory[:, order], atol=1e-5)
    assert is_the_same is (positions == "none")
    if not is_the_same:
        assert np.abs(floats(shuffled - memory[:, order])).max() > 0.1


# Training


def gradient(model: Transformer, params: dict[str, Any]) -> dict[str, Any]:
    def loss(params: dict[str, Any]) -> Array:
        logits = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(5))
        return cross_entropy(logits, TARGET, 0.1).smoothed

    return jax.jit(jax.grad(loss))(params)


def test_remat_changes_memory_and_not_gradients() -> None:
    model, params = small()
    again, _ = small(remat=True)
    assert jax.tree.structure(abstract_params(again)) == jax.tree.structure(params)
    plain, recomputed = gradient(model, params), gradient(again, params)
    for expected, actual in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
        assert np.any(np.abs(expected) > 1e-3)


def dropouts(model: Transformer) -> list[tuple[tuple[str, ...], float, Array]]:
    """Return the place, the rate and the mask of each dropout of one training pass."""
    places: list[tuple[tuple[str, ...], float]] = []

    def masks(params: dict[str, Any]) -> list[Array]:
        masks: list[Array] = []

        def record(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if not isinstance(context.module, Dropout) or context.method_name != "__call__":
                return call(*args, **kwargs)
            assert kwargs == {"train": True}
            places.append((context.module.path, context.module.rate))
            masks.append(call(jnp.ones_like(args[0]), **kwargs) != 0)
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            rngs = {"dropout": jax.random.key(0)}
            model.apply({"params": params}, SOURCE, TARGET, train=True, rngs=rngs)
        return masks

    drawn = jax.jit(masks)(drawn_params(model, SOURCE, TARGET))
    return [(*place, mask) for place, mask in zip(places, drawn, strict=True)]


def test_dropout_acts_where_the_paper_says() -> None:
    """Section 5.4: on each sub-layer's output, and on both sums of embeddings and positions."""
    model, _ = small(num_layers=2)
    acting = [(path, mask) for path, rate, mask in dropouts(model) if rate > 0]
    after = {
        "encoder": ["after_self_attention", "after_feed_forward"],
        "decoder": ["after_self_attention", "after_cross_attention", "after_feed_forward"],
    }
    places = [("source_positions",), ("target_positions",)] + [
        (f"{stack}_{i}", sublayer)
        for stack, sublayers in after.items()
        for i in range(2)
        for sublayer in sublayers
    ]
    assert sorted(path[:-1] for path, _ in acting) == sorted(places)
    assert len(acting) == 2 + 2 * 2 + 3 * 2
    for _, mask in acting:
        # On d_model wide vectors; half of about 160 numbers.
        assert mask.shape[-1] == SMALL.d_model
        assert 0.3 < float(mask.mean()) < 0.7
    masks = {np.asarray(mask).tobytes() for _, mask in acting}
    assert len(masks) == len(acting), "each place must draw a mask of its own"


def test_later_kinds_of_dropout_act_when_asked_for() -> None:
    model, _ = small(dropout=0.0, attention_dropout=0.2, activation_dropout=0.3)
    rates = [rate for _, rate, _ in dropouts(model)]
    # Three attentions and two feed-forward networks in a pair of layers.
    assert (rates.count(0.2), rates.count(0.3)) == (3, 2)


def test_only_training_drops_out() -> None:
    model, params = small()
    still = apply(model, params, SOURCE, TARGET)
    without, _ = small(dropout=0.0)
    np.testing.assert_array_equal(apply(without, params, SOURCE, TARGET, train=True), still)
    trained = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(0))
    other = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(1))
    assert not np.allclose(trained, still, atol=0.1)
    assert not np.allclose(trained, other, atol=0.1)


# What is attended to


def all_weights(model: Transformer, params: dict[str, Any]) -> dict[str, Array]:
    return jax.jit(attention_weights, static_argnums=0)(model, params, SOURCE, TARGET)


def test_attention_of_gives_all_weights_by_kind() -> None:
    model, params = small(num_layers=2, num_heads=3)
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
    # Nothing of padding, and nothing of the future.
    for kind in ("encoder", "cross"):
        assert not np.any(weights[kind][:, 1, ..., 4:])
        assert np.all(weights[kind][:, 1, ..., :4])
    decoder = floats(weights["decoder"])
    past = np.broadcast_to(np.tril(np.ones((5, 5), bool)), decoder.shape)
    np.testing.assert_array_equal(decoder > 0, past)


def test_attention_of_the_first_layers_is_that_of_embeddings() -> None:
    model, params = small()
    weights = all_weights(model, params)
    table = floats(params["embedding"]["table"])
    for stack, pieces, mask in (
        ("encoder", SOURCE, source_mask(SOURCE)),
        ("decoder", shift_right(TARGET), causal_mask(TARGET.shape[1])),
    ):
        x = table[np.asarray(pieces)] * math.sqrt(SMALL.d_model)
        x += sinusoid(pieces.shape[1], SMALL.d_model)
        expected = multi_head_weights(params[f"{stack}_0"]["self_attention"], x, x, mask)
        np.testing.assert_allclose(weights[stack][0], expected, atol=1e-5)


def test_attention_of_a_model_with_remat_is_the_same() -> None:
    model, params = small()
    again, _ = small(remat=True)
    expected = all_weights(model, params)
    for kind, weights in all_weights(again, params).items():
        np.testing.assert_allclose(weights, expected[kind], atol=1e-6)


# Parameters


def test_abstract_parameters_are_those_of_init() -> None:
    model, _ = small()
    actual = jax.tree.map(lambda x: (x.shape, x.dtype), init_params(model, jax.random.key(0)))
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(model))
    assert actual == expected


def test_abstract_parameters_take_no_room() -> None:
    # 32 TiB for the embedding alone.
    leaves = jax.tree.leaves(abstract_params(Transformer(ModelConfig(d_model=2**19), 2**24)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert max(math.prod(leaf.shape) for leaf in leaves) == 2**43


def test_parameters_are_float32_whatever_the_computation() -> None:
    model, _ = small(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(model))} == {
        jnp.dtype("float32")
    }


def test_init_is_a_function_of_the_key() -> None:
    model, _ = small()
    first, again, other = (init_params(model, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    table = "embedding", "table"
    assert not np.allclose(first[table[0]][table[1]], other[table[0]][table[1]])


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_parameter_counts_tell_each_kind_and_add_up(positions: str, layer_norm: str) -> None:
    changes = {"positions": positions, "layer_norm": layer_norm}
    model, params = small(**changes, num_layers=2, num_heads=3, d_k=4, d_v=5)
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
