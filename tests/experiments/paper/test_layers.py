"""Test the layer types of Table 1 against NumPy loops."""

import jax
import numpy as np
import pytest
from oracles import apply, drawn_params, floats, normal

from experiments.paper.layers import LAYERS, Convolution, SeparableConvolution

WIDTH, LENGTH, KERNEL = 16, 6, 3
X = normal(0, 2, LENGTH, WIDTH)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_preserves_the_shape(name: str) -> None:
    layer = LAYERS[name](WIDTH)
    y = jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), X)[0])
    assert y.shape == X.shape


@pytest.mark.parametrize("name", LAYERS)
def test_the_width_of_a_layer_can_be_odd(name: str) -> None:
    layer, x = LAYERS[name](WIDTH + 1), X[..., :1].repeat(WIDTH + 1, axis=-1)
    assert jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), x)[0]).shape == x.shape


def test_a_convolution_sums_the_products_of_its_window() -> None:
    layer = Convolution(WIDTH, KERNEL)
    params = drawn_params(layer, X)
    kernel, bias = floats(params["Conv_0"]["kernel"]), floats(params["Conv_0"]["bias"])
    expected = np.zeros(X.shape) + bias
    for t, k in np.ndindex(LENGTH, KERNEL):
        if 0 <= (s := t + k - KERNEL // 2) < LENGTH:
            expected[:, t] += floats(X[:, s]) @ kernel[k]
    np.testing.assert_allclose(apply(layer, params, X), expected, atol=1e-5)


def test_a_separable_convolution_mixes_positions_and_then_channels() -> None:
    layer = SeparableConvolution(WIDTH, KERNEL)
    params = drawn_params(layer, X)
    depth, point = floats(params["depth"]["kernel"])[:, 0], params["point"]
    mixed = np.zeros(X.shape)
    for t, k in np.ndindex(LENGTH, KERNEL):
        if 0 <= (s := t + k - KERNEL // 2) < LENGTH:
            mixed[:, t] += floats(X[:, s]) * depth[k]
    expected = mixed @ floats(point["kernel"]) + floats(point["bias"])
    np.testing.assert_allclose(apply(layer, params, X), expected, atol=1e-5)
