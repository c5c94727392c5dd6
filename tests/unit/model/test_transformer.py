"""Test the complete model against its equations, and test which inputs affect each output."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jaxtyping import Array
from models import SOURCE, TARGET, make_model
from oracles import SMALL_MODEL, apply, drawn_params, floats, normal, transformer

from transformer_jax.model.dropout import Dropout
from transformer_jax.model.encoder_decoder import init_params, shift_right
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.losses import cross_entropy
from transformer_jax.model.masks import source_mask
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_tokens import BOS, EOS, PAD


def test_the_model_equals_its_equations() -> None:
    model, params = make_model(num_layers=2, num_heads=3, d_k=4, d_v=5)
    expected = transformer(params, SOURCE, TARGET)
    np.testing.assert_allclose(apply(model, params, SOURCE, TARGET), expected, atol=1e-4)


def test_shifting_right_adds_the_decoder_start_and_drops_the_last_token() -> None:
    shifted = shift_right(jnp.asarray([[8, 3, EOS], [7, EOS, PAD]]))
    assert shifted.tolist() == [[BOS, 8, 3], [BOS, 7, EOS]]


def test_no_position_sees_the_future() -> None:
    """The gradient of the logits with respect to the embeddings of later positions must be zero."""
    model, params = make_model()
    memory = normal(0, 1, 4, SMALL_MODEL.d_model)
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

    jacobian = jax.jit(jax.jacobian(logits))(jnp.zeros((1, length, SMALL_MODEL.d_model)))
    # The first two axes of the Jacobian are those of the logits: position and token. The last three
    # axes are those of the embeddings: batch (of size 1), position, and d_model.
    has_influence = np.any(floats(jacobian)[:, :, 0], axis=(1, 3))
    np.testing.assert_array_equal(has_influence, np.tril(np.ones((length, length), bool)))


def test_a_prediction_depends_only_on_earlier_tokens() -> None:
    model, params = make_model()
    before = apply(model, params, SOURCE, TARGET)
    for t in range(TARGET.shape[1] - 1):
        changed = TARGET.at[:, t:].set(6)
        after = apply(model, params, SOURCE, changed)
        # The decoder reads token t at position t + 1, so logits up to position t do not change.
        np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert not np.allclose(after[:, t + 1], before[:, t + 1], atol=0.01)


def test_every_source_position_influences_every_prediction() -> None:
    model, params = make_model()
    before = apply(model, params, SOURCE, TARGET)
    for s in range(SOURCE.shape[1]):
        after = apply(model, params, SOURCE.at[0, s].set(10), TARGET)
        assert np.all(np.abs(floats(after - before)[0]).max(axis=-1) > 1e-4), s
        np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_padding_does_not_change_the_output(positions: str) -> None:
    model, params = make_model(positions=positions)
    before = apply(model, params, SOURCE, TARGET)
    padded_source = jnp.pad(SOURCE, ((0, 0), (0, 3)))
    padded_target = jnp.pad(TARGET, ((0, 0), (0, 2)))
    after = apply(model, params, padded_source, padded_target)
    np.testing.assert_allclose(after[:, : TARGET.shape[1]], before, atol=1e-5)
    # If a token replaces the padding, the output must change.
    other = apply(model, params, padded_source.at[:, SOURCE.shape[1]].set(7), padded_target)
    assert not np.allclose(other[:, : TARGET.shape[1]], before, atol=0.01)


def test_the_memory_of_padding_does_not_reach_the_decoder() -> None:
    model, params = make_model()
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
    model, params = make_model()
    assert np.all(np.isfinite(apply(model, params, SOURCE * 0, TARGET * 0)))


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
def test_the_encoder_ignores_order_only_without_positions(positions: str) -> None:
    model, params = make_model(positions=positions)
    order = jnp.asarray([3, 0, 5, 1, 4, 2])
    memory = apply(model, params, SOURCE[:1], method="encode")
    shuffled = apply(model, params, SOURCE[:1, order], method="encode")
    is_order_ignored = np.allclose(shuffled, memory[:, order], atol=1e-5)
    assert is_order_ignored is (positions == "none")
    if not is_order_ignored:
        assert np.abs(floats(shuffled - memory[:, order])).max() > 0.1


def gradient(model: Transformer, params: dict[str, Any]) -> dict[str, Any]:
    def loss(params: dict[str, Any]) -> Array:
        logits = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(5))
        return cross_entropy(logits, TARGET, 0.1).smoothed

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.slow
def test_remat_does_not_change_gradients() -> None:
    model, params = make_model()
    with_remat, _ = make_model(remat=True)
    assert jax.tree.structure(abstract_params(with_remat)) == jax.tree.structure(params)
    plain, recomputed = gradient(model, params), gradient(with_remat, params)
    for expected, actual in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
        assert np.any(np.abs(expected) > 1e-3)


@pytest.mark.slow
def test_gradients_of_bfloat16_logits_are_close_to_those_of_float32_logits() -> None:
    model, params = make_model()
    rounding, _ = make_model(logits_dtype="bfloat16")
    exact, rounded = gradient(model, params), gradient(rounding, params)
    for expected, actual in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert actual.dtype == jnp.float32
        difference = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
        assert 0 < difference < 0.01


def dropouts(model: Transformer) -> list[tuple[tuple[str, ...], float, Array]]:
    """Return the path, rate, and mask of each dropout module in a training-mode forward pass."""
    modules: list[tuple[tuple[str, ...], Any]] = []

    def masks(params: dict[str, Any]) -> list[Array]:
        masks: list[Array] = []

        def record(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if not isinstance(context.module, Dropout) or context.method_name != "__call__":
                return call(*args, **kwargs)
            assert kwargs == {"train": True}
            modules.append((context.module.path, context.module.rate))
            masks.append(call(jnp.ones_like(args[0]), **kwargs) != 0)
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            rngs = {"dropout": jax.random.key(0)}
            model.apply({"params": params}, SOURCE, TARGET, train=True, rngs=rngs)
        return masks

    drawn = jax.jit(masks)(drawn_params(model, SOURCE, TARGET))
    return [(*module, mask) for module, mask in zip(modules, drawn, strict=True)]


def test_dropout_acts_at_the_points_that_the_paper_names() -> None:
    """Section 5.4 applies dropout to the sub-layers' outputs and to embeddings plus positions."""
    model, _ = make_model(num_layers=2)
    active = [(path, mask) for path, rate, mask in dropouts(model) if rate > 0]
    after = {
        "encoder": ["after_self_attention", "after_feed_forward"],
        "decoder": ["after_self_attention", "after_cross_attention", "after_feed_forward"],
    }
    points = [("source_positions",), ("target_positions",)] + [
        (f"{stack}_{i}", sublayer)
        for stack, sublayers in after.items()
        for i in range(2)
        for sublayer in sublayers
    ]
    assert sorted(path[:-1] for path, _ in active) == sorted(points)
    assert len(active) == 2 + 2 * 2 + 3 * 2
    for _, mask in active:
        # The last axis of each mask has size d_model. Masks have 192 elements in the encoder and
        # 160 in the decoder. Each mask keeps about half of its elements.
        assert mask.shape[-1] == SMALL_MODEL.d_model
        assert 0.3 < float(mask.mean()) < 0.7
    masks = {np.asarray(mask).tobytes() for _, mask in active}
    assert len(masks) == len(active), "each module must draw its own mask"


def test_attention_and_activation_dropout_act_if_configured() -> None:
    model, _ = make_model(dropout=0.0, attention_dropout=0.2, activation_dropout=0.3)
    rates = [rate for _, rate, _ in dropouts(model)]
    # Together, an encoder layer and a decoder layer have three attention sub-layers and two
    # feed-forward networks.
    assert (rates.count(0.2), rates.count(0.3)) == (3, 2)


def test_dropout_acts_only_in_training() -> None:
    model, params = make_model()
    still = apply(model, params, SOURCE, TARGET)
    without, _ = make_model(dropout=0.0)
    np.testing.assert_array_equal(apply(without, params, SOURCE, TARGET, train=True), still)
    trained = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(0))
    other = apply(model, params, SOURCE, TARGET, train=True, rng=jax.random.key(1))
    assert not np.allclose(trained, still, atol=0.1)
    assert not np.allclose(trained, other, atol=0.1)


def test_initial_parameters_are_a_function_of_the_key() -> None:
    model, _ = make_model()
    first, second, other = (init_params(model, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert not np.allclose(first["embedding"]["table"], other["embedding"]["table"])
