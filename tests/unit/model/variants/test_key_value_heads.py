"""Test shared keys and values, normalized queries and keys, and custom attention classes."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from models import SOURCE, TARGET, VOCABULARY, causal, make_model, make_self_attention
from oracles import SMALL_MODEL, apply, drawn_params, floats, initial_params, normal

import transformer_jax as tj
from transformer_jax.model.attention import Heads, dot_product, repeat_heads, weighted_sum
from transformer_jax.model.inspect import attention_weights

HEADS = {"num_heads": 4, "d_k": 4, "d_v": 6}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "relative"},
        {"attention_score": "additive"},
        {"attention_window": 2},
        {"attention_implementation": "blockwise"},
        {"query_key_norm": True, "positions": "rotary"},
    ],
    ids=str,
)
def test_shared_heads_equal_heads_with_repeated_parameters(
    num_kv_heads: int, changes: dict[str, Any]
) -> None:
    config = replace(SMALL_MODEL, **HEADS, **changes)
    x = normal(0, 2, 5, config.d_model)
    shared = make_self_attention(replace(config, num_kv_heads=num_kv_heads))
    params = drawn_params(shared, x, x, causal())
    assert params["key"]["kernel"].shape == (config.d_model, num_kv_heads, 4)
    assert params["value"]["kernel"].shape == (config.d_model, num_kv_heads, 6)
    repeated = dict(params)
    for name in ("key", "value"):
        kernel = np.repeat(floats(params[name]["kernel"]), 4 // num_kv_heads, axis=1)
        repeated[name] = {"kernel": jnp.asarray(kernel, jnp.float32)}
    expected = apply(make_self_attention(config), repeated, x, x, causal())
    np.testing.assert_allclose(apply(shared, params, x, x, causal()), expected, atol=1e-5)


def test_keys_and_values_are_not_repeated_in_memory() -> None:
    query, key, value = normal(0, 2, 3, 8, 4), normal(1, 2, 50, 2, 4), normal(2, 2, 50, 2, 4)
    traced = jax.make_jaxpr(lambda q, k, v: weighted_sum(dot_product(q, k), v))(query, key, value)
    scores = 2 * 8 * 3 * 50
    assert max(x.aval.size for e in traced.eqns for x in e.outvars) == scores < 4 * key.size


def start_decoding(model: Any, params: Any, **sizes: int) -> Any:
    return model.apply({"params": params}, SOURCE, **sizes, method="init_decoding")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_cache_shrinks_with_the_number_of_key_value_heads(num_kv_heads: int) -> None:
    model, params = make_model(num_kv_heads=num_kv_heads, **HEADS)
    state = start_decoding(model, params, num_hypotheses=3, max_length=7)
    rows, length = SOURCE.shape
    for caches, entries in ((state.caches, 21), (state.memories, length)):
        sizes = [x.size for x in jax.tree.leaves(caches)]
        assert sizes == [rows * num_kv_heads * width * entries for width in (4, 6)]


def test_the_number_of_key_value_heads_must_divide_the_number_of_heads() -> None:
    rule = r"a divisor of num_heads \(4\), got 3"
    with pytest.raises(tj.ConfigError, match=f"^model.num_kv_heads must be {rule}"):
        replace(SMALL_MODEL, **HEADS, num_kv_heads=3)


def test_queries_and_keys_are_divided_by_their_root_mean_square_in_each_head() -> None:
    config = replace(SMALL_MODEL, **HEADS, query_key_norm=True)
    x = normal(0, 2, 5, config.d_model)
    attention = make_self_attention(config)
    params = drawn_params(attention, x, x, causal())
    query = apply(attention, params, x, method="project_queries")
    key, value = apply(attention, params, x, method="project_keys_and_values")
    for name, found in (("query", query), ("key", key)):
        plain = np.einsum("btd,dhk->bthk", floats(x), floats(params[name]["kernel"]))
        expected = np.zeros(plain.shape)
        for index in np.ndindex(plain.shape[:3]):
            root = math.sqrt(np.mean(plain[index] ** 2) + config.layer_norm_epsilon)
            expected[index] = plain[index] / root * floats(params[f"{name}_norm"]["scale"])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    plain = np.einsum("btd,dhk->bthk", floats(x), floats(params["value"]["kernel"]))
    np.testing.assert_allclose(value, plain, atol=1e-5)


class SigmoidAttention(tj.MultiHeadAttention):
    """Attention whose weights do not sum to one."""

    def attend_heads(self, heads: Heads, _train: bool, /) -> Array:
        scores = jnp.where(heads.mask, self.score(heads.query, heads.key), -1e9)
        weights = jax.nn.sigmoid(scores)
        self.sow("intermediates", "weights", weights)
        return jnp.einsum("bhts,bshv->bthv", weights, repeat_heads(heads.value, 4))


class SecretAttention(SigmoidAttention):
    """Attention that does not record its weights."""

    def sow(self, *_: Any, **__: Any) -> bool:
        return False


@pytest.mark.usefixtures("forget_parts")
def test_the_attention_of_a_user_is_cached_and_shown() -> None:
    tj.register("model.attention_implementation", "sigmoid")(SigmoidAttention)
    tj.register("model.attention_implementation", "secret")(SecretAttention)
    changes = {"attention_implementation": "sigmoid", "attention_score": "general"}
    config = replace(SMALL_MODEL, num_layers=1, **HEADS, num_kv_heads=2, **changes)
    model = tj.build_transformer(config, VOCABULARY)
    params = drawn_params(model, SOURCE, TARGET)
    logits = apply(model, params, SOURCE, TARGET)
    state = start_decoding(model, params, num_hypotheses=1, max_length=4)
    tokens = jnp.concatenate([jnp.ones((2, 1), jnp.int32), TARGET[:, :-1]], axis=1)
    ancestors = jnp.zeros((2, 1, 4), jnp.int32)
    for t in range(4):
        token, position = tokens[:, t : t + 1], jnp.asarray(t)
        arrays = token, position, ancestors, state
        step, state = apply(model, params, *arrays, method="decode_step")
        np.testing.assert_allclose(step[:, 0], logits[:, t], atol=1e-4)
    weights = attention_weights(model, params, SOURCE, TARGET)["cross"]
    assert weights.shape == (1, 2, 4, *TARGET.shape[1:], *SOURCE.shape[1:])
    assert not np.allclose(weights.sum(axis=-1), 1, atol=0.1)
    secret = tj.build_transformer(replace(config, attention_implementation="secret"), VOCABULARY)
    with pytest.raises(tj.UsageError, match="implementation secret does not record its weights"):
        attention_weights(secret, params, SOURCE, TARGET)


class AddOnes(tj.AddPositions):
    """A position scheme that does not distinguish between positions."""

    def encode(self, positions: Array) -> Array:
        return jnp.ones((len(positions), self.config.d_model))


@pytest.mark.usefixtures("forget_parts")
def test_only_positions_with_their_own_attention_exclude_a_window() -> None:
    ones, own = tj.PositionScheme(AddOnes), tj.PositionScheme(AddOnes, SigmoidAttention)
    tj.register("model.positions", "ones")(ones)
    tj.register("model.positions", "own")(own)
    config = replace(SMALL_MODEL, num_layers=1, attention_window=2, positions="ones")
    model = tj.build_transformer(config, VOCABULARY)
    logits = apply(model, initial_params(model, SOURCE, TARGET), SOURCE, TARGET)
    assert np.all(np.isfinite(logits))
    replace(config, attention_window=None, attention_implementation="blockwise")
    excluded: list[dict[str, Any]] = [
        {"attention_window": 2},
        {"attention_implementation": "blockwise"},
    ]
    for changes in excluded:
        with pytest.raises(tj.ConfigError, match=r"model.positions must be sinusoidal or .*'own'"):
            replace(SMALL_MODEL, positions="own", **changes)
