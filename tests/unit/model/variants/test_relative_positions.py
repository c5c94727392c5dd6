"""Test self-attention with ALiBi, rotary, relative, and T5 positions against their formulas."""

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import ArrayLike
from models import make_decoder_layer, make_self_attention
from oracles import (
    SMALL_MODEL,
    Floats,
    Params,
    apply,
    coins,
    drawn_params,
    floats,
    initial_params,
    normal,
    softmax,
)

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import Positions, dot_product
from transformer_jax.model.build import POSITIONS, choose_components
from transformer_jax.model.variants.relative_positions import (
    CausalT5Attention,
    T5Attention,
    alibi_slopes,
    rotate,
)

HEADS, D_K, D_V, WIDTH = 3, 4, 5, 6
FORMULAS = ["alibi", "rotary", "relative", "t5"]

# The arguments are the head, the query, the key, the query position, and the key position.
PairScore = Callable[[int, Floats, Floats, int, int], float]
# The arguments are the value, the query position, and the key position. The result is the vector
# that enters the weighted average.
PairValue = Callable[[Floats, int, int], Floats]


def config_of(positions: Any, **changes: Any) -> ModelConfig:
    small = replace(
        SMALL_MODEL, d_model=WIDTH, num_heads=HEADS, d_k=D_K, d_v=D_V, max_relative_position=2
    )
    small = replace(small, position_buckets=8)
    return replace(small, positions=positions, **changes)


def formulas(positions: str, params: Params, config: ModelConfig) -> tuple[PairScore, PairValue]:
    """Return a position scheme's formulas for the score and the value of a query-key pair."""
    scale = 1 / math.sqrt(D_K) if config.attention_score == "scaled_dot_product" else 1.0

    def alibi(head: int, query: Floats, key: Floats, t: int, s: int) -> float:
        # With three heads, ALiBi uses both slopes of a two-head model, followed by the first slope
        # of a four-head model.
        slope = [2**-4, 2**-8, 2**-2][head]
        return float(query @ key) * scale - slope * abs(t - s)

    def rotary(_: int, query: Floats, key: Floats, t: int, s: int) -> float:
        # Treat each pair of components as a complex number. Each pair adds
        # Re(q e^(i t angle) (k e^(i s angle))*) to the unscaled score.
        total = 0.0
        for i in range(D_K // 2):
            angle = 10000 ** (-2 * i / D_K)
            q, k = complex(*query[2 * i : 2 * i + 2]), complex(*key[2 * i : 2 * i + 2])
            rotated = q * cmath.exp(1j * t * angle) * (k * cmath.exp(1j * s * angle)).conjugate()
            total += rotated.real
        return total * scale

    def clipped(name: str, t: int, s: int) -> Floats:
        return floats(params[name])[2 + max(-2, min(2, s - t))]

    def relative(_: int, query: Floats, key: Floats, t: int, s: int) -> float:
        return float(query @ (key + clipped("relative_key", t, s))) * scale

    def t5(head: int, query: Floats, key: Floats, t: int, s: int) -> float:
        bucket = t5_bucket(s - t, bidirectional=True, num_buckets=8)
        return float(query @ key) * scale + float(floats(params["bias"])[bucket, head])

    def with_relative(value: Floats, t: int, s: int) -> Floats:
        return value + clipped("relative_value", t, s)

    def plain(value: Floats, _query: int, _key: int) -> Floats:
        return value

    return {
        "alibi": (alibi, plain),
        "rotary": (rotary, plain),
        "relative": (relative, with_relative),
        "t5": (t5, plain),
    }[positions]


def t5_bucket(relative_position: int, *, bidirectional: bool, num_buckets: int) -> int:
    """Compute the bucket with the formula in T5's `_relative_position_bucket`."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets if relative_position > 0 else 0
        distance = abs(relative_position)
    else:
        distance = max(-relative_position, 0)
    max_exact = num_buckets // 2
    if distance < max_exact:
        return bucket + distance
    share = math.log(distance / max_exact) / math.log(128 / max_exact)
    # Without the 1e-9, a rounding error could move the smallest distance in a bucket to the
    # previous bucket.
    large = max_exact + math.floor(share * (num_buckets - max_exact) + 1e-9)
    return bucket + min(large, num_buckets - 1)


def attend(
    params: Params, x: ArrayLike, mask: ArrayLike, score: PairScore, value_of: PairValue
) -> Floats:
    """Compute multi-head self-attention with loops, given the score and value of each pair."""
    x = floats(x)
    batch, length, _ = x.shape
    allowed = np.broadcast_to(np.asarray(mask), (batch, 1, length, length))
    result = np.zeros((batch, length, WIDTH))
    for b, h, t in np.ndindex(batch, HEADS, length):
        query, key, value = (
            x[b] @ floats(params[name]["kernel"])[:, h] for name in ("query", "key", "value")
        )
        keys = np.flatnonzero(allowed[b, 0, t])
        weights = softmax(floats([score(h, query[t], key[s], t, int(s)) for s in keys]))
        average = sum(w * value_of(value[s], t, int(s)) for w, s in zip(weights, keys, strict=True))
        result[b, t] += average @ floats(params["output"]["kernel"])[h]
    return result


@pytest.mark.parametrize(
    "score", ["scaled_dot_product", pytest.param("dot_product", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("positions", FORMULAS)
def test_self_attention_equals_its_formula(positions: str, score: str) -> None:
    config = config_of(positions, attention_score=score)
    x, mask = normal(0, 2, 7, WIDTH), coins(1, 0.6, 2, 1, 7, 7) | jnp.eye(7, dtype=bool)[None, None]
    model = make_self_attention(config)
    params = drawn_params(model, x, x, mask)
    expected = attend(params, x, mask, *formulas(positions, params, config))
    np.testing.assert_allclose(apply(model, params, x, x, mask), expected, atol=2e-5)


def test_the_relative_schemes_have_their_own_self_attention() -> None:
    relative = {name for name, scheme in POSITIONS.items() if scheme.self_attention}
    assert relative == set(FORMULAS)


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(positions, marks=[] if positions == "relative" else [pytest.mark.slow])
        for positions in FORMULAS
    ],
)
def test_attention_to_the_source_ignores_positions(positions: Any) -> None:
    """As in the paper, the output does not depend on the order of the encoder's output vectors."""
    config = config_of(positions)
    layer = make_decoder_layer(config)
    x, memory = normal(0, 1, 4, WIDTH), normal(1, 1, 5, WIDTH)
    masks = jnp.tril(jnp.ones((1, 1, 4, 4), bool)), jnp.ones((1, 1, 1, 5), bool)
    params = drawn_params(layer, x, memory, *masks)
    assert set(params["cross_attention"]) == {"query", "key", "value", "output"}
    order = jnp.asarray([3, 0, 4, 1, 2])
    before = apply(layer, params, x, memory, *masks)
    after = apply(layer, params, x, memory[:, order], *masks)
    np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("positions", FORMULAS)
def test_only_the_distance_of_query_and_key_matters(positions: str) -> None:
    """Shifting all queries and keys by the same distance does not change the output."""
    config = config_of(positions)
    x, mask = normal(0, 1, 3, WIDTH), jnp.ones((1, 1, 3, 3), bool)
    model = make_self_attention(config)
    params = drawn_params(model, x, x, mask)
    before = apply(model, params, x, x, mask)
    key, value = apply(model, params, x, method="project_keys_and_values")
    key, value = (jnp.pad(y, ((0, 0), (5, 0), (0, 0), (0, 0))) for y in (key, value))
    later = jnp.arange(8) >= 5
    args = x, key, value, later[None, None, None]

    def queries_from(start: int) -> Positions:
        return Positions(start + jnp.arange(3), jnp.arange(8))

    after = apply(model, params, *args, positions=queries_from(5), method="attend")
    np.testing.assert_allclose(after, before, atol=1e-5)
    at_other_distance = apply(model, params, *args, positions=queries_from(3), method="attend")
    assert not np.allclose(at_other_distance, before, atol=0.001)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (8, [2**-n for n in range(1, 9)]),
        (16, [2 ** (-n / 2) for n in range(1, 17)]),
        # With six heads, ALiBi uses all slopes of a four-head model, followed by the first and
        # third slopes of an eight-head model.
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_are_those_of_the_alibi_paper(heads: int, expected: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx(expected)


def test_rotary_positions_preserve_norms_and_the_first_position() -> None:
    x = normal(0, 2, 9, HEADS, 8)
    rotated = rotate(x, jnp.arange(x.shape[1]))
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), 1e-5)
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])
    assert not np.allclose(rotated[:, 1], x[:, 1], atol=0.1)
    assert rotate(x.astype(jnp.bfloat16), jnp.arange(x.shape[1])).dtype == jnp.bfloat16


def test_rotary_positions_rotate_float64_vectors_without_rounding_to_float32() -> None:
    x = floats(normal(0, 1, 300, 1, 4))
    with jax.enable_x64(True):
        rotated = floats(rotate(jnp.asarray(x), jnp.arange(300)))
    pairs, turned = (y[0, :, 0, ::2] + 1j * y[0, :, 0, 1::2] for y in (x, rotated))
    angles = np.arange(300)[:, None] / np.array([1.0, 100.0])
    np.testing.assert_allclose(turned, pairs * np.exp(1j * angles), rtol=1e-12, atol=1e-12)


def test_all_heads_share_a_vector_for_each_distance_up_to_the_maximum() -> None:
    config = config_of("relative", max_relative_position=7)
    x, mask = normal(0, 1, 2, WIDTH), jnp.ones((1, 1, 2, 2), bool)
    params = initial_params(make_self_attention(config), x, x, mask)
    assert params["relative_key"].shape == (15, D_K)
    assert params["relative_value"].shape == (15, D_V)


@pytest.mark.parametrize("num_buckets", [4, 10, 32, 64])
@pytest.mark.parametrize("kind", [T5Attention, CausalT5Attention])
def test_t5_buckets_are_those_of_t5(kind: type[T5Attention], num_buckets: int) -> None:
    model = kind(config_of("t5", position_buckets=num_buckets), lambda _: dot_product)
    buckets = model.to_buckets(Positions(jnp.asarray([300]), jnp.arange(601)))[0]
    expected = [
        t5_bucket(k - 300, bidirectional=not kind.is_causal, num_buckets=num_buckets)
        for k in range(601)
    ]
    assert buckets.tolist() == expected
    assert set(expected) == set(range(num_buckets)) - ({num_buckets // 2} - set(expected))


def test_t5s_decoder_uses_all_buckets_for_earlier_positions() -> None:
    components = choose_components(config_of("t5"))
    assert components.self_attention is T5Attention
    assert components.causal_self_attention is CausalT5Attention
    for scheme in FORMULAS[:3]:
        components = choose_components(config_of(scheme))
        assert components.causal_self_attention is components.self_attention
