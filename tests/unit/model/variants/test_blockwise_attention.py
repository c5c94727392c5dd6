"""Test blockwise attention against full attention."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from models import SOURCE, TARGET, make_model, make_self_attention
from oracles import SMALL_MODEL, apply, attention, coins, drawn_params, examples, floats, normal

from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.attention import masked_softmax, scaled_dot_product, weighted_sum
from transformer_jax.model.build import build_transformer
from transformer_jax.model.dropout import dropout
from transformer_jax.model.masks import causal_mask
from transformer_jax.model.variants import blockwise_attention as blockwise_module
from transformer_jax.model.variants.blockwise_attention import (
    Inputs,
    block_size,
    blockwise_attention,
    join_blocks,
    split_blocks,
)
from transformer_jax.training.step import TrainStep, init_state

RNG = jax.random.key(7)
MASK_SHAPES = [(2, 3, 7, 9), (1, 3, 1, 9), (2, 1, 1, 9), (1, 1, 7, 9)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks of queries and keys, so that even small inputs span several blocks."""
    monkeypatch.setattr(blockwise_module, "MAX_QUERIES", 3)
    monkeypatch.setattr(blockwise_module, "MAX_KEYS", 4)


@functools.partial(jax.jit, static_argnames="rate")
def full(
    query: Array, key: Array, value: Array, mask: Array, rate: float = 0.0, rng: Array | None = None
) -> Array:
    """Implement equation 1 with the package's own functions."""
    weights = masked_softmax(scaled_dot_product(query, key), mask)
    if rng is not None:
        weights = dropout(weights, rate, rng)
    return weighted_sum(weights, value)


@functools.partial(jax.jit, static_argnames="rate")
def blockwise(
    query: Array, key: Array, value: Array, mask: Array, rate: float = 0.0, rng: Array | None = None
) -> Array:
    scale = query.shape[-1] ** -0.5
    traced = None if rng is None else jnp.float32(rate)
    return blockwise_attention(Inputs(query, key, value), mask, rng, traced, scale)


def inputs(queries: int, keys: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Array, ...]:
    """Draw queries, keys, and values for two sentences, with 3 heads, d_k = 4, and d_v = 5."""
    shapes = (2, queries, 3, 4), (2, keys, 3, 4), (2, keys, 3, 5)
    return tuple(2 * normal(seed + i, *s).astype(dtype) for i, s in enumerate(shapes))


@functools.partial(jax.jit, static_argnums=(0, 3))
def values_and_gradients(
    attend: Any, arrays: tuple[Array, ...], mask: Array, rate: float, rng: Array | None
) -> tuple[Array, ...]:
    """Return the output and its gradients with respect to the query, key, and value."""
    output, vjp = jax.vjp(lambda *arrays: attend(*arrays, mask, rate, rng), *arrays)
    return output, *vjp(normal(99, *output.shape).astype(output.dtype))


def assert_same_output_and_gradients(
    arrays: tuple[Array, ...],
    mask: Array,
    rate: float = 0.0,
    rng: Array | None = None,
    *,
    atol: float = 1e-5,
) -> None:
    """Check that both implementations produce the same outputs and gradients."""
    pairs = (values_and_gradients(f, arrays, mask, rate, rng) for f in (blockwise, full))
    for actual, expected in zip(*pairs, strict=True):
        assert actual.dtype == expected.dtype
        actual, expected = floats(actual), floats(expected)
        np.testing.assert_allclose(actual, expected, atol=atol * np.abs(expected).max())
        assert expected.std() > 0


@pytest.mark.parametrize("mask_shape", MASK_SHAPES)
@given(seed=st.integers(0, 10_000))
@examples(3)
def test_blockwise_attention_is_equation_1(mask_shape: tuple[int, ...], seed: int) -> None:
    query, key, value = inputs(7, 9, seed=seed)
    mask = coins(seed, 0.4, *mask_shape)
    expected = attention(query, key, value, mask, scale=0.5)[1]
    np.testing.assert_allclose(blockwise(query, key, value, mask), expected, atol=1e-5)


@pytest.mark.parametrize("mask_shape", MASK_SHAPES)
def test_output_and_gradients_are_those_of_full_attention(mask_shape: tuple[int, ...]) -> None:
    """The masks allow only a few keys per query, and none at all for some queries."""
    mask = coins(1, 0.3, *mask_shape).at[0, 0, 0].set(False).at[-1, -1, -1, 2].set(True)
    assert_same_output_and_gradients(inputs(7, 9), mask, 0.4, RNG)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (6, 3), (8, 8)])
def test_all_lengths_and_masked_queries_are_supported(
    queries: int, keys: int, share: float
) -> None:
    arrays, mask = inputs(queries, keys), coins(3, share, 2, 1, queries, keys)
    output, expected = (f(*arrays, mask, 0.2, RNG) for f in (blockwise, full))
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_a_causal_mask_works_with_dropout() -> None:
    assert_same_output_and_gradients(inputs(10, 10), causal_mask(10), 0.2, RNG)


def test_key_blocks_that_no_query_may_read_are_skipped() -> None:
    """Reading a key that contains NaN makes the output NaN, even if the key's weight is zero."""
    query, key, value = inputs(12, 12)
    output = blockwise(query, key.at[:, 8:].set(jnp.nan), value, causal_mask(12))
    # The keys from position 8 onward form the last block, which earlier queries may not read.
    assert np.all(np.isfinite(output[:, :6]))
    assert not np.any(np.isfinite(output[:, 9:]))
    padding = (jnp.arange(12) < 8)[None, None, None]
    assert np.all(np.isfinite(blockwise(query, key.at[:, 8:].set(jnp.nan), value, padding)))


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs(7, 9)
    assert_same_output_and_gradients((30 * query, key, value), causal_mask(9)[:, :, 2:], atol=1e-4)


def test_bfloat16_is_as_exact_as_in_full_attention() -> None:
    arrays = inputs(10, 10, jnp.bfloat16)
    mask = causal_mask(10)
    assert_same_output_and_gradients(arrays, mask, 0.2, RNG, atol=0.02)
    exact = full(*(x.astype(jnp.float32) for x in arrays), mask)
    error, full_error = (np.abs(floats(f(*arrays, mask) - exact)).mean() for f in (blockwise, full))
    assert error < 1.2 * full_error


def test_dropout_drops_the_same_weights_as_in_full_attention() -> None:
    """The values are unit vectors, so the output equals the attention weights."""
    query, key, _ = inputs(7, 9)
    value = jnp.broadcast_to(jnp.eye(9)[None, :, None], (2, 9, 3, 9))
    mask = jnp.ones((1, 1, 1, 9), bool)
    weights, expected = (f(query, key, value, mask, 0.5, RNG) for f in (blockwise, full))
    np.testing.assert_array_equal(weights == 0, expected == 0)
    assert 0.4 < np.mean(weights == 0) < 0.6


@pytest.mark.parametrize(
    ("length", "max_size", "size"), [(2048, 256, 256), (1100, 256, 220), (3, 8, 3)]
)
def test_blocks_are_equal_and_as_few_as_possible(length: int, max_size: int, size: int) -> None:
    assert block_size(length, max_size) == size


def test_joining_blocks_undoes_splitting_them() -> None:
    x = normal(0, 2, 7, 3, 4)
    assert split_blocks(x, 3).shape == (3, 3, 2, 3, 4)
    np.testing.assert_array_equal(split_blocks(x, 3)[1, 2, :, 0], x[:, 6, 1])
    np.testing.assert_array_equal(join_blocks(split_blocks(x, 3), 7), x)


def test_no_array_is_as_large_as_all_weights() -> None:
    arrays, mask = inputs(256, 256), jnp.ones((2, 1, 1, 256), bool)

    def temporary_bytes(attend: Any) -> Any:
        compute = jax.grad(lambda *x: attend(*x, mask, 0.1, RNG).sum(), argnums=(0, 1, 2))
        memory: Any = jax.jit(compute).lower(*arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes

    weights_bytes = 4 * 2 * 3 * 256 * 256
    assert temporary_bytes(full) >= weights_bytes
    assert temporary_bytes(blockwise) < weights_bytes / 2


DROPPED = replace(SMALL_MODEL, num_layers=1, dropout=0.1, attention_dropout=0.3)


@pytest.mark.exhaustive
def test_training_steps_are_those_of_full_attention_also_with_remat() -> None:
    config = TrainConfig(warmup_steps=10)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 13, (2, 2, 10)))
    batch = Batch(tokens[0].at[1, 6:].set(0), tokens[1].at[0, 7:].set(0))

    def train(**changes: Any) -> Any:
        model = build_transformer(replace(DROPPED, **changes), 13)
        state, step = init_state(model, config), jax.jit(TrainStep(model, config))
        for _ in range(2):
            state, metrics = step(state, batch)
        return state.params, metrics.loss, metrics.gradient_norm

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        train(attention_implementation="blockwise", remat=True),
        train(),
    )


@pytest.mark.parametrize("score", ["scaled_dot_product", "dot_product"])
def test_multi_head_attention_is_the_same_in_every_implementation(score: Any) -> None:
    x, mask = normal(0, 2, 10, 16), causal_mask(10)
    config = replace(DROPPED, attention_score=score)
    model = make_self_attention(config)
    other = make_self_attention(replace(config, attention_implementation="blockwise"))
    params = drawn_params(model, x, x, mask)
    still, dropped = (
        apply(other, params, x, x, mask, train=train, rng=RNG) for train in (False, True)
    )
    np.testing.assert_allclose(still, apply(model, params, x, x, mask), atol=1e-5)
    expected = apply(model, params, x, x, mask, train=True, rng=RNG)
    np.testing.assert_allclose(dropped, expected, atol=1e-5)
    assert not np.allclose(still, dropped, atol=0.01)


@pytest.mark.slow
def test_a_blockwise_model_records_no_weights_and_stays_blockwise_when_asked_for_them() -> None:
    model, params = make_model(attention_implementation="blockwise")
    _, variables = apply(model, params, SOURCE, TARGET, mutable=("intermediates",))
    assert not variables

    def lower(mutable: Any) -> str:
        def compute_logits(params: Any) -> Any:
            output: Any = model.apply({"params": params}, SOURCE, TARGET, mutable=mutable)
            return output[0] if mutable else output

        return jax.jit(compute_logits).lower(params).as_text()

    assert lower(["intermediates"]) == lower(False)
