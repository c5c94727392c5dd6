"""Test that a dense layer matches Flax's, except that it is initialized as one matrix."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from oracles import apply, drawn_params, initial_params, normal

from transformer_jax.model.linear import Dense

# Each case gives the shapes of x and of the matrix, and the number of axes to contract.
SHAPES = {
    "feed forward": ((3, 5, 8), (8, 12), 1),
    "to heads": ((3, 5, 8), (8, 2, 4), 1),
    "from heads": ((3, 5, 2, 4), (2, 4, 8), 2),
    "of one position": ((3, 8), (8, 12), 1),
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in SHAPES), ("to heads", "bfloat16")]
)
def test_dense_equals_the_dense_layer_of_flax(case: str, dtype: str) -> None:
    shape, matrix, axes = SHAPES[case]
    features, x = matrix[axes:], normal(0, *shape)
    model = Dense(features, dtype, num_input_axes=axes)
    flax_model = nn.DenseGeneral(
        features,
        axis=tuple(range(-axes, 0)),
        dtype=dtype,
        kernel_init=nn.initializers.xavier_uniform(),
    )
    jax.tree.map(
        np.testing.assert_array_equal, initial_params(model, x), initial_params(flax_model, x)
    )
    params = drawn_params(model, x)
    output, expected = apply(model, params, x), apply(flax_model, params, x)
    assert output.dtype == expected.dtype == jnp.dtype(dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)


def test_a_kernel_starts_glorot_uniform_as_one_matrix() -> None:
    kernel = np.asarray(initial_params(Dense((8, 16), "float32"), normal(0, 2, 64))["kernel"])
    bound = math.sqrt(6 / (64 + 8 * 16))
    assert kernel.shape == (64, 8, 16)
    assert 0.99 * bound < np.abs(kernel).max() <= bound
