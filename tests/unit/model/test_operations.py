"""Test that matrix products agree with `dot_general` and do not make transposed copies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import lower_for
from jaxtyping import Array
from oracles import SMALL_MODEL, normal

from transformer_jax.model.embeddings import Embedding
from transformer_jax.model.operations import matmul, multiply_to_float32
from transformer_jax.model.target_platform import tracing_for

# Each case gives the shapes of x and of the matrix, and the number of axes to contract.
SHAPES = {
    "feed forward": ((3, 5, 8), (8, 12), 1),
    "to heads": ((3, 5, 8), (8, 2, 4), 1),
    "from heads": ((3, 5, 2, 4), (2, 4, 8), 2),
    "of one position": ((3, 8), (8, 12), 1),
}
on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="reads what XLA's CPU backend compiles"
)


def dimension_numbers(x: tuple[int, ...], num_input_axes: int) -> Any:
    """Return the `dimension_numbers` argument for `jax.lax.dot_general`."""
    return ((tuple(range(len(x)))[-num_input_axes:], tuple(range(num_input_axes))), ((), ()))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("case", SHAPES)
def test_a_product_and_its_gradients_are_those_of_dot_general(case: str, platform: str) -> None:
    x, matrix, axes = SHAPES[case]
    arrays = normal(0, *x), normal(1, *matrix)
    numbers = dimension_numbers(x, axes)
    expected, expected_vjp = jax.vjp(lambda x, m: jax.lax.dot_general(x, m, numbers), *arrays)
    with tracing_for(platform):
        product, vjp = jax.vjp(lambda x, m: matmul(x, m, num_input_axes=axes), *arrays)
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, atol=1e-6)
    cotangent = normal(2, *expected.shape)
    for actual, gradient in zip(vjp(cotangent), expected_vjp(cotangent), strict=True):
        np.testing.assert_allclose(actual, gradient, atol=1e-6)


def test_sums_have_the_preferred_dtype() -> None:
    x, matrix = jnp.ones((2, 3, 1000), jnp.bfloat16), jnp.full((1000, 4), 1.01, jnp.bfloat16)
    product = matmul(x, matrix, preferred_element_type=jnp.float32)
    # In bfloat16, the nearest number to 1.01 is 1.0078125. There is no bfloat16 number between 1004
    # and 1008, so the sum must be in float32.
    np.testing.assert_array_equal(product, np.full((2, 3, 4), 1007.8125, np.float32))
    assert matmul(x, matrix).dtype == jnp.bfloat16


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_gradients_of_bfloat16_products_are_close_to_those_in_float32(platform: str) -> None:
    x, matrix, cotangent = normal(0, 3, 5, 8), normal(1, 8, 12), normal(2, 3, 5, 12)
    _, expected = jax.vjp(matmul, x, matrix)
    with tracing_for(platform):
        rounded = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
        product, vjp = jax.vjp(functools.partial(multiply_to_float32, matmul), *rounded)
    assert product.dtype == jnp.float32
    for actual, gradient in zip(vjp(cotangent), expected(cotangent), strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(actual.astype(jnp.float32), gradient, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("case", ["feed forward", "to heads", "from heads"])
def test_only_a_cpu_needs_flat_arrays(case: str) -> None:
    x, matrix, axes = SHAPES[case]

    def gradients(x: Array, matrix: Array) -> Any:
        return jax.grad(lambda x, m: matmul(x, m, num_input_axes=axes).sum(), (0, 1))(x, matrix)

    arrays = normal(0, *x), normal(1, *matrix)
    assert "stablehlo.reshape" in lower_for("cpu", gradients, *arrays)
    for platform in ("cuda", "tpu"):
        assert "stablehlo.reshape" not in lower_for(platform, gradients, *arrays)


@on_cpu
@pytest.mark.parametrize("case", ["feed forward", "to heads", "from heads"])
def test_the_gradient_of_the_matrix_needs_no_transposed_copy(case: str) -> None:
    small_x, small_matrix, axes = SHAPES[case]
    x, matrix = (tuple(16 * n for n in shape) for shape in (small_x, small_matrix))

    def gradient(x: Array, matrix: Array, cotangent: Array) -> Array:
        product = jax.vjp(lambda m: matmul(x, m, num_input_axes=axes), matrix)
        return product[1](cotangent)[0]

    shapes = x, matrix, (*x[:-axes], *matrix[axes:])
    assert_needs_no_transposed_copy(
        gradient, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    )


@on_cpu
def test_the_gradient_of_the_shared_matrix_needs_no_transposed_copy() -> None:
    embedding = Embedding(SMALL_MODEL, 300)
    x, cotangent = (
        jax.ShapeDtypeStruct((8, 16, n), jnp.float32) for n in (SMALL_MODEL.d_model, 300)
    )
    params = {"params": {"table": jax.ShapeDtypeStruct((300, SMALL_MODEL.d_model), jnp.float32)}}

    def gradient(params: Any, x: Array, cotangent: Array) -> Any:
        def logits(params: Any) -> Any:
            return embedding.apply(params, x, method="logits")

        return jax.vjp(logits, params)[1](cotangent)[0]

    assert_needs_no_transposed_copy(gradient, params, x, cotangent)


def assert_needs_no_transposed_copy(function: Any, *arguments: Any) -> None:
    program: Any = jax.jit(function).lower(*arguments).compile().as_text()
    assert " dot(" in program
    assert " transpose(" not in program
    assert " copy(" not in program
