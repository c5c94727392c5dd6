"""Test the activations of the feed-forward networks against their definitions."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models import make_encoder_layer
from oracles import SMALL, Floats, apply, drawn_params, floats, normal

from transformer_jax.model.layers import FeedForward


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
    layer = make_encoder_layer(replace(SMALL, activation=name))
    x = normal(0, 2, 5, SMALL.d_model)
    network = FeedForward(SMALL, layer.components.activation)
    params = drawn_params(network, x)

    def dense(x: Floats, name: str) -> Floats:
        return x @ floats(params[name]["kernel"]) + floats(params[name]["bias"])

    inner = dense(floats(x), "inner")
    outputs = {n: dense(np.vectorize(f)(inner), "outer") for n, f in ACTIVATIONS.items()}
    np.testing.assert_allclose(apply(network, params, x), outputs.pop(name), atol=1e-5)
    for other in outputs.values():
        assert not np.allclose(apply(network, params, x), other, atol=0.01)
