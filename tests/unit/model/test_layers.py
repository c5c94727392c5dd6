"""Test layers against loop implementations of their equations and against PyTorch's layers."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from models import (
    BATCH,
    SOURCES,
    TARGETS,
    WIDTH,
    as_array,
    attention_params,
    causal,
    disallowed,
    feed_forward_params,
    is_source_token,
    make_decoder_layer,
    make_encoder_layer,
    norm_params,
    torch_layer,
)
from oracles import (
    SMALL_MODEL,
    Floats,
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
from transformer_jax.model.build import choose_components
from transformer_jax.model.layers import AddAndNorm, FeedForward, check_shape

BIASED = replace(SMALL_MODEL, attention_bias=True)


@pytest.mark.parametrize("config", [SMALL_MODEL, replace(BIASED, num_heads=3, d_k=4, d_v=5)])
def test_the_encoder_layer_equals_its_equations(config: ModelConfig) -> None:
    x, mask = normal(0, BATCH, SOURCES, WIDTH), is_source_token()
    layer = make_encoder_layer(config)
    params = drawn_params(layer, x, mask)
    expected = encoder_layer(params, x, mask)
    np.testing.assert_allclose(apply(layer, params, x, mask), expected, atol=1e-5)


@pytest.mark.parametrize("config", [SMALL_MODEL, replace(BIASED, num_heads=3, d_k=4, d_v=5)])
def test_the_decoder_layer_equals_its_equations(config: ModelConfig) -> None:
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    layer = make_decoder_layer(config)
    arrays = x, memory, causal(), is_source_token()
    params = drawn_params(layer, *arrays)
    expected = decoder_layer(params, *arrays)
    np.testing.assert_allclose(apply(layer, params, *arrays), expected, atol=1e-5)


def test_the_residual_adds_the_input_and_not_the_query() -> None:
    """A faulty layer could add the projected query, which has the same shape in this test."""
    config = replace(SMALL_MODEL, num_heads=1, d_k=WIDTH, d_v=WIDTH)
    x, mask = normal(0, BATCH, SOURCES, WIDTH), is_source_token()
    layer = make_encoder_layer(config)
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


def test_an_output_that_would_be_broadcast_is_rejected() -> None:
    x = jnp.zeros((2, 3, 4))
    assert check_shape("a sub-layer", x, x) is x
    with pytest.raises(ValueError, match=r"a sub-layer must return .*\(2, 3, 4\), got \(2, 3, 1\)"):
        check_shape("a sub-layer", x[..., :1], x)


def test_the_feed_forward_network_is_two_convolutions_of_kernel_size_one() -> None:
    x = normal(0, BATCH, TARGETS, WIDTH)
    layer = FeedForward(SMALL_MODEL)
    params = drawn_params(layer, x)

    def convolve(x: Array, dense: Mapping[str, Array]) -> Array:
        kernel = dense["kernel"].T[:, :, None]
        output = jax.lax.conv(x, kernel, window_strides=(1,), padding="VALID")
        return output + dense["bias"][None, :, None]

    channels_first = x.swapaxes(1, 2)
    inner = convolve(channels_first, params["inner"])
    expected = convolve(jnp.maximum(inner, 0), params["outer"]).swapaxes(1, 2)
    np.testing.assert_allclose(apply(layer, params, x), expected, atol=1e-5)
    # Some inputs to the ReLU must be negative, so that the ReLU has an effect.
    assert np.any(np.asarray(inner) < 0)


def test_the_feed_forward_network_acts_on_each_position_alone() -> None:
    x = normal(0, BATCH, TARGETS, WIDTH)
    layer = FeedForward(SMALL_MODEL)
    params = drawn_params(layer, x)
    order = jnp.asarray([3, 0, 4, 1, 2])
    shuffled = apply(layer, params, x[:, order])
    np.testing.assert_allclose(shuffled, apply(layer, params, x)[:, order], atol=1e-6)


def test_a_fresh_add_and_norm_gives_mean_zero_and_variance_one() -> None:
    x, y = 3 + 5 * normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, TARGETS, WIDTH)
    layer = AddAndNorm(SMALL_MODEL)
    output = apply(layer, initial_params(layer, x, y, method="leave"), x, y, method="leave")
    np.testing.assert_allclose(np.mean(floats(output), axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(np.var(floats(output), axis=-1), 1, atol=1e-5)


def test_epsilon_is_added_to_the_variance() -> None:
    config = replace(SMALL_MODEL, layer_norm_epsilon=1.0)
    x, y = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, TARGETS, WIDTH)
    layer = AddAndNorm(config)
    params = drawn_params(layer, x, y, method="leave")
    expected = layer_norm(params["norm"], floats(x) + floats(y), epsilon=1.0)
    output = apply(layer, params, x, y, method="leave")
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_dropout_acts_on_the_sub_layer_output_before_the_sum() -> None:
    """Dropout applies only to the sub-layer output, before the sum and the norm (section 5.4)."""
    x, zeros = normal(0, BATCH, TARGETS, WIDTH), jnp.zeros((BATCH, TARGETS, WIDTH))
    layer, rng = AddAndNorm(SMALL_MODEL), jax.random.key(1)
    params = drawn_params(layer, x, zeros, method="leave")

    def leave(params: Any, x: Array, y: Array) -> Array:
        return apply(layer, params, x, y, train=True, rng=rng, method="leave")

    expected = layer_norm(params["norm"], x)
    np.testing.assert_allclose(leave(params, x, zeros), expected, atol=1e-5)

    # If the sub-layer returns ones, dropout at rate 0.5 passes zeros and twos to the norm.
    plain = {"norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}}
    dropped = leave(plain, zeros, zeros + 1)
    for vector in floats(dropped).reshape(-1, WIDTH):
        assert len(np.unique(vector.round(4))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL_MODEL, BIASED])
def test_the_encoder_layer_agrees_with_pytorch(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    x, mask = normal(0, BATCH, SOURCES, WIDTH), is_source_token()
    theirs = torch_layer(torch, "TransformerEncoderLayer", config)
    params = {
        "self_attention": attention_params(theirs.self_attn, config),
        "after_self_attention": {"norm": norm_params(theirs.norm1)},
        "feed_forward": feed_forward_params(theirs),
        "after_feed_forward": {"norm": norm_params(theirs.norm2)},
    }

    output = apply(make_encoder_layer(config), params, x, mask)
    expected = theirs(
        torch.from_numpy(np.array(x)), src_key_padding_mask=disallowed(torch, mask[:, 0, 0])
    )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL_MODEL, BIASED])
def test_the_decoder_layer_agrees_with_pytorch(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    x, memory = normal(0, BATCH, TARGETS, WIDTH), normal(1, BATCH, SOURCES, WIDTH)
    mask, memory_mask = causal(), is_source_token()
    theirs = torch_layer(torch, "TransformerDecoderLayer", config)
    params = {
        "self_attention": attention_params(theirs.self_attn, config),
        "after_self_attention": {"norm": norm_params(theirs.norm1)},
        "cross_attention": attention_params(theirs.multihead_attn, config),
        "after_cross_attention": {"norm": norm_params(theirs.norm2)},
        "feed_forward": feed_forward_params(theirs),
        "after_feed_forward": {"norm": norm_params(theirs.norm3)},
    }

    output = apply(make_decoder_layer(config), params, x, memory, mask, memory_mask)
    expected = theirs(
        torch.from_numpy(np.array(x)),
        torch.from_numpy(np.array(memory)),
        tgt_mask=disallowed(torch, mask[0, 0]),
        memory_key_padding_mask=disallowed(torch, memory_mask[:, 0, 0]),
    )
    np.testing.assert_allclose(output, as_array(expected), atol=1e-5)


def gelu(x: float) -> float:
    """Return x times the probability that a standard normal variable is below x."""
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


ACTIVATIONS = {
    "relu": lambda x: max(0.0, x),
    "gelu": gelu,
    "swish": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_feed_forward_network_applies_the_activation_between_its_layers(name: Any) -> None:
    config = replace(SMALL_MODEL, activation=name)
    x = normal(0, 2, 5, config.d_model)
    network: Any = choose_components(config).feed_forward(config)
    params = drawn_params(network, x)

    def dense(x: Floats, name: str) -> Floats:
        return x @ floats(params[name]["kernel"]) + floats(params[name]["bias"])

    inner = dense(floats(x), "inner")
    outputs = {n: dense(np.vectorize(f)(inner), "outer") for n, f in ACTIVATIONS.items()}
    np.testing.assert_allclose(apply(network, params, x), outputs.pop(name), atol=1e-5)
    for other in outputs.values():
        assert not np.allclose(apply(network, params, x), other, atol=0.01)
