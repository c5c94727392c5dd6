"""Attention in blocks against attention with all weights at hand."""

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
from oracles import SMALL, attention, coins, drawn_params, examples, floats, normal

from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model import attention as attention_module
from transformer_jax.model.attention import (
    MultiHeadAttention,
    masked_softmax,
    scaled_dot_product,
    weighted_sum,
)
from transformer_jax.model.dropout import dropout
from transformer_jax.model.transformer import Transformer, attention_weights, causal_mask
from transformer_jax.model.variants import blockwise_attention as blockwise_module
from transformer_jax.model.variants.blockwise_attention import (
    block_size,
    blockwise_attention,
    cut,
    joined,
)
from transformer_jax.model.variants.relative_positions import SELF_ATTENTIONS
from transformer_jax.training.step import init_state, make_train_step

RNG = jax.random.key(7)
MASK_SHAPES = [(2, 3, 7, 9), (1, 3, 1, 9), (2, 1, 1, 9), (1, 1, 7, 9)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so short that a few queries and keys are many of them."""
    monkeypatch.setattr(blockwise_module, "QUERIES", 3)
    monkeypatch.setattr(blockwise_module, "KEYS", 4)


@functools.partial(jax.jit, static_argnames="rate")
def plain(
    query: Array, key: Array, value: Array, mask: Array, rate: float = 0.0, rng: Array | None = None
) -> Array:
    """Equation 1 of the package's parts."""
    weights = masked_softmax(scaled_dot_product(query, key), mask)
    if rng is not None:
        weights = dropout(weights, rate, rng)
    return weighted_sum(weights, value)


@functools.partial(jax.jit, static_argnames="rate")
def in_blocks(
    query: Array, key: Array, value: Array, mask: Array, rate: float = 0.0, rng: Array | None = None
) -> Array:
    scale = query.shape[-1] ** -0.5
    return blockwise_attention(query, key, value, mask, scale=scale, rate=rate, rng=rng)


def inputs(queries: int, keys: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Array, ...]:
    """Return queries, keys and values of two rows and three heads; d_k 4, d_v 5."""
    shapes = (2, queries, 3, 4), (2, keys, 3, 4), (2, keys, 3, 5)
    return tuple(2 * normal(seed + i, *s).astype(dtype) for i, s in enumerate(shapes))


@functools.partial(jax.jit, static_argnums=(0, 3))
def values_and_gradients(
    attend: Any, arrays: tuple[Array, ...], mask: Array, rate: float, rng: Array | None
) -> tuple[Array, ...]:
    """Return the mixed values, then the gradients of query, key and value for random ones."""
    mixed, pull = jax.vjp(lambda *arrays: attend(*arrays, mask, rate, rng), *arrays)
    return mixed, *pull(normal(99, *mixed.shape).astype(mixed.dtype))


def assert_same(
    arrays: tuple[Array, ...],
    mask: Array,
    rate: float = 0.0,
    rng: Array | None = None,
    *,
    atol: float = 1e-5,
) -> None:
    """Claim that both paths give the same values and gradients, none of them constant."""
    pairs = (values_and_gradients(f, arrays, mask, rate, rng) for f in (in_blocks, plain))
    for ours, theirs in zip(*pairs, strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = floats(ours), floats(theirs)
        np.testing.assert_allclose(ours, theirs, atol=atol * np.abs(theirs).max())
        assert theirs.std() > 0


@pytest.mark.parametrize("mask_shape", MASK_SHAPES)
@given(seed=st.integers(0, 10_000))
@examples(3)
def test_attention_in_blocks_is_equation_1(mask_shape: tuple[int, ...], seed: int) -> None:
    query, key, value = inputs(7, 9, seed=seed)
    mask = coins(seed, 0.4, *mask_shape)
    expected = attention(query, key, value, mask, scale=0.5)[1]
    np.testing.assert_allclose(in_blocks(query, key, value, mask), expected, atol=1e-5)


@pytest.mark.parametrize("mask_shape", MASK_SHAPES)
def test_values_and_gradients_are_those_of_all_weights_at_once(mask_shape: tuple[int, ...]) -> None:
    """With rows in which nothing is allowed, and others in which it is little."""
    mask = coins(1, 0.3, *mask_shape).at[0, 0, 0].set(False).at[-1, -1, -1, 2].set(True)
    assert_same(inputs(7, 9), mask, 0.4, RNG)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (6, 3), (8, 8)])
def test_any_lengths_do(queries: int, keys: int, share: float) -> None:
    arrays, mask = inputs(queries, keys), coins(3, share, 2, 1, queries, keys)
    ours, theirs = in_blocks(*arrays, mask, 0.2, RNG), plain(*arrays, mask, 0.2, RNG)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_causal_mask_with_dropout() -> None:
    assert_same(inputs(10, 10), causal_mask(10), 0.2, RNG)


def test_keys_that_nobody_may_look_at_are_not_even_computed() -> None:
    """Not a number there would be one everywhere, times a weight of zero too."""
    query, key, value = inputs(12, 12)
    mixed = in_blocks(query, key.at[:, 8:].set(jnp.nan), value, causal_mask(12))
    # The queries of a block look at blocks of keys: the last one begins with key 8.
    assert np.all(np.isfinite(mixed[:, :6]))
    assert not np.any(np.isfinite(mixed[:, 9:]))
    padding = (jnp.arange(12) < 8)[None, None, None]
    assert np.all(np.isfinite(in_blocks(query, key.at[:, 8:].set(jnp.nan), value, padding)))


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs(7, 9)
    assert_same((30 * query, key, value), causal_mask(9)[:, :, 2:], atol=1e-4)


def test_bfloat16_is_no_less_exact_than_with_all_weights_at_once() -> None:
    arrays = inputs(10, 10, jnp.bfloat16)
    mask = causal_mask(10)
    assert_same(arrays, mask, 0.2, RNG, atol=0.02)
    exact = plain(*(x.astype(jnp.float32) for x in arrays), mask)
    ours, theirs = (np.abs(floats(f(*arrays, mask) - exact)).mean() for f in (in_blocks, plain))
    assert ours < 1.2 * theirs


def test_dropout_drops_the_very_weights_that_it_drops_of_the_whole_array() -> None:
    """Values are unit vectors, so that what comes out is the weights."""
    query, key, _ = inputs(7, 9)
    value = jnp.broadcast_to(jnp.eye(9)[None, :, None], (2, 9, 3, 9))
    mask = jnp.ones((1, 1, 1, 9), bool)
    ours, theirs = (f(query, key, value, mask, 0.5, RNG) for f in (in_blocks, plain))
    np.testing.assert_array_equal(ours == 0, theirs == 0)
    assert 0.4 < np.mean(ours == 0) < 0.6


@pytest.mark.parametrize(
    ("length", "most", "size"), [(2048, 256, 256), (1100, 256, 220), (3, 8, 3)]
)
def test_blocks_are_equal_and_fit(length: int, most: int, size: int) -> None:
    assert block_size(length, most) == size


def test_what_is_cut_can_be_joined() -> None:
    x = normal(0, 2, 7, 3, 4)
    assert cut(x, 3).shape == (3, 3, 2, 3, 4)
    np.testing.assert_array_equal(cut(x, 3)[1, 2, :, 0], x[:, 6, 1])
    np.testing.assert_array_equal(joined(cut(x, 3), 7), x)


def test_nothing_of_the_size_of_all_weights_is_ever_made() -> None:
    arrays, mask = inputs(256, 256), jnp.ones((2, 1, 1, 256), bool)

    def largest(attend: Any) -> Any:
        compute = jax.grad(lambda *x: attend(*x, mask, 0.1, RNG).sum(), argnums=(0, 1, 2))
        memory: Any = jax.jit(compute).lower(*arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes

    weights = 4 * 2 * 3 * 256 * 256
    assert largest(plain) >= weights
    assert largest(in_blocks) < weights / 2


LONG_CONFIG = replace(SMALL, num_layers=1, dropout=0.1, attention_dropout=0.3)


def choose(monkeypatch: pytest.MonkeyPatch, long: int) -> list[int]:
    """Let attention go by blocks from so many pairs on; return a list of those that did."""
    seen: list[int] = []

    def spied(query: Array, key: Array, *rest: Array, **options: Any) -> Array:
        seen.append(query.shape[1] * key.shape[1])
        return blockwise_attention(query, key, *rest, **options)

    monkeypatch.setattr(attention_module, "LONG", long)
    monkeypatch.setattr(attention_module, "blockwise_attention", spied)
    return seen


def test_training_steps_are_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so they are where each layer is computed twice, with the same masks."""
    config = TrainConfig(warmup_steps=10)
    pieces = jnp.asarray(np.random.default_rng(0).integers(3, 13, (2, 2, 10)))
    batch = Batch(pieces[0].at[1, 6:].set(0), pieces[1].at[0, 7:].set(0))
    ends = []
    for long, remat in ((10**9, False), (1, True)):
        model = Transformer(replace(LONG_CONFIG, remat=remat), 13)
        seen = choose(monkeypatch, long)
        state = init_state(model, config)
        step = jax.jit(make_train_step(model, config))
        for _ in range(2):
            state, metrics = step(state, batch)
        assert bool(seen) is (long == 1)
        ends.append((state.params, metrics.loss, metrics.gradient_norm))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), *ends)


@pytest.mark.parametrize("score", ["scaled_dot_product", "dot_product"])
def test_the_same_module_gives_the_same_whether_long_or_not(
    score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, mask = normal(0, 2, 10, 16), causal_mask(10)
    changes: dict[str, Any] = {"attention_score": score}
    model = MultiHeadAttention(replace(LONG_CONFIG, **changes))
    params = drawn_params(model, x, x, mask)
    outputs: list[Any] = []
    for long in (100, 101):
        seen = choose(monkeypatch, long)
        rngs = {"dropout": RNG}
        outputs.append(model.apply({"params": params}, x, x, mask, train=True, rngs=rngs))
        outputs.append(model.apply({"params": params}, x, x, mask))
        assert set(seen) == ({100} if long == 100 else set())
    np.testing.assert_allclose(outputs[0], outputs[2], atol=1e-5)
    np.testing.assert_allclose(outputs[1], outputs[3], atol=1e-5)
    assert not np.allclose(outputs[0], outputs[1], atol=0.01)


@pytest.mark.parametrize(
    "changes",
    [{"positions": name} for name in SELF_ATTENTIONS]
    + [{"attention_score": name} for name in ("general", "additive")],
    ids=str,
)
def test_only_the_papers_attention_goes_by_blocks(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LONG_CONFIG, **changes)
    model = SELF_ATTENTIONS[config.positions](config)
    x, mask = normal(0, 1, 6, 16), causal_mask(6)
    params = drawn_params(model, x, x, mask)
    seen = choose(monkeypatch, 1)
    jax.eval_shape(lambda: model.apply({"params": params}, x, x, mask))
    is_papers = type(model) is MultiHeadAttention and "attention_score" not in changes
    assert bool(seen) is is_papers


def test_who_asks_for_the_weights_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(replace(LONG_CONFIG), 13)
    source, target = jnp.asarray([[5, 9, 3, 12, 7, 2]]), jnp.asarray([[8, 3, 10, 2]])
    params = drawn_params(model, source, target)
    expected = attention_weights(model, params, source, target)
    seen = choose(monkeypatch, 1)
    weights = attention_weights(model, params, source, target)
    assert not seen
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
