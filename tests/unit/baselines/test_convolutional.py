"""Test the convolutional encoder-decoder against NumPy loops."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from models import SOURCE, TARGET, VOCABULARY
from oracles import (
    SMALL_MODEL,
    Floats,
    Params,
    apply,
    drawn_params,
    floats,
    sigmoid,
    sinusoid,
    softmax,
)

from transformer_jax.baselines.build import build_model
from transformer_jax.config import ModelConfig
from transformer_jax.model.encoder_decoder import shift_right
from transformer_jax.model.inspect import attention_weights, hidden_states
from transformer_jax.special_tokens import PAD

SIZE = SMALL_MODEL.d_model


def linear(params: Params, x: Floats) -> Floats:
    return x @ floats(params["kernel"]) + floats(params["bias"])


def gated_convolution(params: Params, x: Floats, start: int) -> Floats:
    """Apply a convolution and a GLU. The window of position t begins at position t + start."""
    kernel, bias = floats(params["convolution"]["kernel"]), floats(params["convolution"]["bias"])
    result = np.zeros_like(x)
    for t in range(len(x)):
        y = bias.copy()
        for k in range(len(kernel)):
            if 0 <= (s := t + start + k) < len(x):
                y += x[s] @ kernel[k]
        result[t] = y[:SIZE] * sigmoid(y[SIZE:])
    return result


class Forward(NamedTuple):
    """The results of a forward pass."""

    logits: Floats
    weights: Floats
    """The attention weights of each layer."""
    encoder: Floats
    """The vectors that enter each encoder layer and leave the last one."""
    decoder: Floats
    """The vectors that enter each decoder layer and leave the last one."""


def forward(params: Params, source: list[int], read: list[int]) -> Forward:
    """Compute equations 1 and 2 of ConvS2S, one position after another."""
    table, half = floats(params["embedding"]["table"]), 0.5**0.5
    width = len(params["encoder_0"]["gated"]["convolution"]["kernel"])

    def embed(tokens: list[int]) -> Floats:
        return table[tokens] * SIZE**0.5 + sinusoid(len(tokens), SIZE)

    embedded = z = embed(source)
    encoder = [z]
    for i in range(SMALL_MODEL.num_layers):
        gated = gated_convolution(params[f"encoder_{i}"]["gated"], z, -((width - 1) // 2))
        z = (z + gated) * half
        encoder.append(z)
    values, all_weights = (z + embedded) * half, list[Floats]()
    x = g = embed(read)
    decoder = [x]
    for i in range(SMALL_MODEL.num_layers):
        layer = params[f"decoder_{i}"]
        h = gated_convolution(layer["gated"], x, 1 - width)
        query = (linear(layer["query"], h) + g) * half
        weights = np.stack([softmax(z @ q) for q in query])
        context = linear(layer["output"], weights @ values * len(source) ** 0.5)
        x = (x + (h + context) * half) * half
        all_weights.append(weights)
        decoder.append(x)
    return Forward(x @ table.T, floats(all_weights), floats(encoder), floats(decoder))


@pytest.mark.parametrize("width", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_model_is_the_equations_of_convs2s_as_loops(width: int) -> None:
    config = replace(
        SMALL_MODEL, architecture="conv", attention_score="dot_product", conv_kernel_width=width
    )
    model = build_model(config, VOCABULARY)
    params = drawn_params(model, SOURCE, TARGET)
    logits = apply(model, params, SOURCE, TARGET)
    weights = jax.jit(attention_weights, static_argnums=0)(model, params, SOURCE, TARGET)
    states = hidden_states(model, params, SOURCE, TARGET)
    assert set(weights) == {"cross"}
    for row, (source, read) in enumerate(zip(SOURCE, shift_right(TARGET), strict=True)):
        tokens = [int(token) for token in source if token != PAD]
        expected = forward(params, tokens, [int(t) for t in read])
        np.testing.assert_allclose(logits[row], expected.logits, atol=1e-3)
        actual = weights["cross"][:, row, 0]
        np.testing.assert_allclose(actual[..., : len(tokens)], expected.weights, atol=1e-4)
        assert not np.any(actual[..., len(tokens) :])
        encoder = states["encoder"][:, row, : len(tokens)]
        np.testing.assert_allclose(encoder, expected.encoder, atol=1e-4)
        np.testing.assert_allclose(states["decoder"][:, row], expected.decoder, atol=1e-3)


@pytest.mark.parametrize("score", ["scaled_dot_product", "general", "additive"])
def test_the_width_can_be_odd_without_sinusoids(score: Any) -> None:
    config = ModelConfig(
        architecture="conv", num_layers=1, d_model=15, positions="learned", attention_score=score
    )
    model = build_model(config, VOCABULARY)
    logits = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), SOURCE, TARGET)[0])
    assert logits.shape == (*TARGET.shape, VOCABULARY)
