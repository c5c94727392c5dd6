"""Layers against their equations in loops, against PyTorch's, and step by step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from numpy.typing import ArrayLike
from oracles import (
    SMALL,
    Floats,
    Wandering,
    apply,
    decoder_layer,
    drawn_params,
    encoder_layer,
    feed_forward,
    floats,
    initial_params,
    layer_norm,
    multi_head_attention,
    normal,
)

from transformer_jax.config import ModelConfig
from transformer_jax.model.layers import AddAndNorm, DecoderLayer, EncoderLayer, FeedForward, Past

BATCH, TARGETS, SOURCES, WIDTH = 2, 5, 6, SMALL.d_model
BIASED = replace(SMALL, attention_bias=True)


def source_tokens() -> Array:
    """Return a mask of two sentences, of which the second is two positions shorter."""
    return jnp.arange(SOURCES)[None, None, None] < jnp.asarray([6, 4])[:, None, None, None]


def causal() -> Array:
    return jnp.tril(jnp.ones((1, 1, TARGETS, TARGETS), bool))


@pytest.mark.parametrize("config", [SMALL, replace(BIASED, num_heads=3, d_k=4, d_v=5)])
def test_encoder_layer_is_its_equations(config: ModelConfig) -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), source_tokens()
    layer = EncoderLayer(config)
    params = drawn_params(layer, x, mask)
    expected = encoder_layer(params, x, mask)
    np.testing.assert_allclose(apply(layer, params, x, mask), expected, atol=1e-5)


@pytest.mark.parametrize("config", [SMALL, replace(BIASED, num_heads=3, d_k=4, d_v=5)])
def test_decoder_layer_is_its_equations(config: ModelConfig) -> None:
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    layer = DecoderLayer(config)
    arrays = x, memory, causal(), source_tokens()
    params = drawn_params(layer, *arrays)
    expected = decoder_layer(params, *arrays)
    np.testing.assert_allclose(apply(layer, params, *arrays), expected, atol=1e-5)


def test_residual_adds_the_input_and_not_the_query() -> None:
    """Article 003 adds the projected query, which has the input's shape with one wide head."""
    config = replace(SMALL, num_heads=1, d_k=WIDTH, d_v=WIDTH)
    x, mask = normal(0, BATCH, SOURCES, WIDTH), source_tokens()
    layer = EncoderLayer(config)
    params = drawn_params(layer, x, mask)

    def layer_with_residual(residual: Floats) -> Floats:
        attended = multi_head_attention(params["self_attention"], x, x, mask)
        y = layer_norm(params["after_self_attention"]["norm"], residual + attended)
        fed = feed_forward(params["feed_forward"], y)
        return layer_norm(params["after_feed_forward"]["norm"], y + fed)

    query = floats(x) @ floats(params["self_attention"]["query"]["kernel"])[:, 0]
    assert query.shape == x.shape
    output = apply(layer, params, x, mask)
    np.testing.assert_allclose(output, layer_with_residual(floats(x)), atol=1e-5)
    assert not np.allclose(output, layer_with_residual(query), atol=0.1)


def test_feed_forward_is_two_convolutions_with_kernel_size_one() -> None:
    x = normal(0, BATCH, TARGETS, WIDTH)
    layer = FeedForward(SMALL)
    params = drawn_params(layer, x)

    def convolve(x: Array, part: Mapping[str, Array]) -> Array:
        kernel = part["kernel"].T[:, :, None]
        return jax.lax.conv(x, kernel, window_strides=(1,), padding="VALID") + part["bias"][:, None]

    channels_first = x.swapaxes(1, 2)
    inner = convolve(channels_first, params["inner"])
    expected = convolve(jnp.maximum(inner, 0), params["outer"]).swapaxes(1, 2)
    np.testing.assert_allclose(apply(layer, params, x), expected, atol=1e-5)
    # The maximum with zero matters.
    assert np.any(np.asarray(inner) < 0)


def test_feed_forward_treats_each_position_alike() -> None:
    x = normal(0, BATCH, TARGETS, WIDTH)
    layer = FeedForward(SMALL)
    params = drawn_params(layer, x)
    order = jnp.asarray([3, 0, 4, 1, 2])
    shuffled = apply(layer, params, x[:, order])
    np.testing.assert_allclose(shuffled, apply(layer, params, x)[:, order], atol=1e-6)


def test_add_and_norm_gives_mean_zero_and_variance_one_to_start_with() -> None:
    x, y = 3 + 5 * normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, TARGETS, WIDTH)
    layer = AddAndNorm(SMALL)
    output = apply(layer, initial_params(layer, x, y), x, y)
    np.testing.assert_allclose(np.mean(floats(output), axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(np.var(floats(output), axis=-1), 1, atol=1e-5)


def test_epsilon_is_added_to_the_variance() -> None:
    config = replace(SMALL, layer_norm_epsilon=1.0)
    x, y = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, TARGETS, WIDTH)
    layer = AddAndNorm(config)
    params = drawn_params(layer, x, y)
    expected = layer_norm(params["norm"], floats(x) + floats(y), epsilon=1.0)
    np.testing.assert_allclose(apply(layer, params, x, y), expected, atol=1e-5)


def test_dropout_acts_on_the_sublayer_before_the_sum() -> None:
    """Section 5.4: the input goes round it; the sum and the norm come after it."""
    x, nothing = normal(0, BATCH, TARGETS, WIDTH), jnp.zeros((BATCH, TARGETS, WIDTH))
    layer, rng = AddAndNorm(SMALL), jax.random.key(1)
    params = drawn_params(layer, x, nothing)

    unharmed = apply(layer, params, x, nothing, train=True, rng=rng)
    np.testing.assert_allclose(unharmed, layer_norm(params["norm"], x), atol=1e-5)

    # Of a sub-layer of ones, the norm sees zeros and twos.
    plain = {"norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}}
    dropped = apply(layer, plain, nothing, nothing + 1, train=True, rng=rng)
    for vector in floats(dropped).reshape(-1, WIDTH):
        assert len(np.unique(vector.round(4))) == 2


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, num_heads=3, d_k=4, d_v=5)])
def test_a_step_does_what_the_whole_layer_does_at_that_position(config: ModelConfig) -> None:
    hypotheses, room = 3, TARGETS + 2
    x = normal(0, BATCH, hypotheses, TARGETS, WIDTH)
    memory, memory_mask = normal(1, BATCH, SOURCES, WIDTH), source_tokens()
    layer = DecoderLayer(config)

    def for_each_hypothesis(y: Array) -> Array:
        return jnp.repeat(y, hypotheses, axis=0)

    flat = x.reshape(-1, TARGETS, WIDTH)
    arrays = flat, for_each_hypothesis(memory), causal(), for_each_hypothesis(memory_mask)
    params = drawn_params(layer, *arrays)
    expected = apply(layer, params, *arrays).reshape(x.shape)

    projected = apply(layer, params, memory, method="memory_keys_and_values")
    # What the cache holds at later positions is not looked at.
    rows, slots = (BATCH, config.num_heads), room * hypotheses
    cache = (
        1000 * normal(2, *rows, config.d_k, slots),
        1000 * normal(3, *rows, slots, config.d_v),
    )
    beam = Wandering(BATCH, hypotheses, room)
    for t in range(TARGETS):
        past = Past.of(jnp.asarray(t), beam.ancestors(t))
        arguments = beam.to_rows(t, x[:, :, t]), past, cache, projected, memory_mask
        output, cache = apply(layer, params, *arguments, method="step")
        np.testing.assert_allclose(beam.from_rows(t, output), expected[:, :, t], atol=1e-5)
    # And written nowhere.
    assert np.abs(floats(cache[1])[:, :, TARGETS * hypotheses :]).max() > 100


# PyTorch's own layers


def copied_norm(norm: Any) -> dict[str, Array]:
    return {"scale": as_array(norm.weight), "bias": as_array(norm.bias)}


def copied_attention(attention: Any, config: ModelConfig) -> dict[str, dict[str, Array]]:
    """Return the parameters of a `torch.nn.MultiheadAttention` under this package's names."""
    heads = config.num_heads
    params: dict[str, dict[str, Array]] = {}
    matrices = np.split(as_array(attention.in_proj_weight), 3)
    biases = np.split(as_array(attention.in_proj_bias), 3)
    for name, matrix, bias in zip(("query", "key", "value"), matrices, biases, strict=True):
        params[name] = {"kernel": jnp.asarray(matrix.T.reshape(WIDTH, heads, -1))}
        if config.attention_bias:
            params[name]["bias"] = jnp.asarray(bias.reshape(heads, -1))
    matrix = as_array(attention.out_proj.weight)
    params["output"] = {"kernel": matrix.T.reshape(heads, -1, WIDTH)}
    if config.attention_bias:
        params["output"]["bias"] = as_array(attention.out_proj.bias)
    return params


def copied_feed_forward(layer: Any) -> dict[str, dict[str, Array]]:
    parts = {"inner": layer.linear1, "outer": layer.linear2}
    return {
        name: {"kernel": as_array(part.weight).T, "bias": as_array(part.bias)}
        for name, part in parts.items()
    }


def as_array(tensor: Any) -> Array:
    return jnp.asarray(tensor.detach().numpy())


def torch_layer(torch: Any, kind: str, config: ModelConfig) -> Any:
    """Return a layer of PyTorch's with drawn parameters; its attention has biases if ours has."""
    layer = getattr(torch.nn, kind)(
        WIDTH,
        config.num_heads,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        activation="relu",
        layer_norm_eps=config.layer_norm_epsilon,
        batch_first=True,
        norm_first=False,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            is_attention_bias = "attn" in name and name.endswith("bias")
            if is_attention_bias and not config.attention_bias:
                parameter.zero_()
            else:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return layer


def hidden(torch: Any, allowed: ArrayLike) -> Any:
    """Return the mask as PyTorch wants it: True means that a position is not seen."""
    return torch.from_numpy(~np.array(allowed))


@pytest.mark.parametrize("config", [SMALL, BIASED])
def test_encoder_layer_agrees_with_pytorch(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    x, mask = normal(0, BATCH, SOURCES, WIDTH), source_tokens()
    theirs = torch_layer(torch, "TransformerEncoderLayer", config)
    params = {
        "self_attention": copied_attention(theirs.self_attn, config),
        "after_self_attention": {"norm": copied_norm(theirs.norm1)},
        "feed_forward": copied_feed_forward(theirs),
        "after_feed_forward": {"norm": copied_norm(theirs.norm2)},
    }

    output = apply(EncoderLayer(config), params, x, mask)
    expected = theirs(
        torch.from_numpy(np.array(x)), src_key_padding_mask=hidden(torch, mask[:, 0, 0])
    )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)


@pytest.mark.parametrize("config", [SMALL, BIASED])
def test_decoder_layer_agrees_with_pytorch(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    mask, memory_mask = causal(), source_tokens()
    theirs = torch_layer(torch, "TransformerDecoderLayer", config)
    params = {
        "self_attention": copied_attention(theirs.self_attn, config),
        "after_self_attention": {"norm": copied_norm(theirs.norm1)},
        "cross_attention": copied_attention(theirs.multihead_attn, config),
        "after_cross_attention": {"norm": copied_norm(theirs.norm2)},
        "feed_forward": copied_feed_forward(theirs),
        "after_feed_forward": {"norm": copied_norm(theirs.norm3)},
    }

    output = apply(DecoderLayer(config), params, x, memory, mask, memory_mask)
    expected = theirs(
        torch.from_numpy(np.array(x)),
        torch.from_numpy(np.array(memory)),
        tgt_mask=hidden(torch, mask[0, 0]),
        memory_key_padding_mask=hidden(torch, memory_mask[:, 0, 0]),
    )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)
