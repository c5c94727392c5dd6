"""Products with a matrix: the same as `dot_general`, and no array that is only turned over."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from oracles import SMALL, normal

from transformer_jax.model.embeddings import SharedEmbedding
from transformer_jax.model.linear import matrix_product

# x, the matrix, and how many axes meet, as the layers of the model have them.
SHAPES = {
    "feed forward": ((3, 5, 8), (8, 12), 1),
    "to heads": ((3, 5, 8), (8, 2, 4), 1),
    "from heads": ((3, 5, 2, 4), (2, 4, 8), 2),
    "of one position": ((3, 8), (8, 12), 1),
}


def dimensions(x: tuple[int, ...], axes: int) -> Any:
    """Say which axes meet, as Flax does."""
    return ((tuple(range(len(x) - axes, len(x))), tuple(range(axes))), ((), ()))


@pytest.mark.parametrize("case", SHAPES)
def test_it_is_dot_general_with_its_gradients(case: str) -> None:
    x, matrix, axes = SHAPES[case]
    arrays = normal(0, *x), normal(1, *matrix)
    numbers = dimensions(x, axes)
    expected, pull = jax.vjp(lambda x, m: jax.lax.dot_general(x, m, numbers), *arrays)
    product, own_pull = jax.vjp(lambda x, m: matrix_product(x, m, numbers), *arrays)
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, atol=1e-6)
    cotangent = normal(2, *expected.shape)
    for own, other in zip(own_pull(cotangent), pull(cotangent), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


def test_sums_have_the_dtype_that_is_asked_for() -> None:
    x, matrix = jnp.ones((2, 3, 1000), jnp.bfloat16), jnp.full((1000, 4), 1.01, jnp.bfloat16)
    product = matrix_product(x, matrix, preferred_element_type=jnp.float32)
    # 1.01 is 1.0078125 in bfloat16, which has no number between 1004 and 1008.
    np.testing.assert_array_equal(product, np.full((2, 3, 4), 1007.8125, np.float32))
    assert matrix_product(x, matrix).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "numbers", [(((1,), (0,)), ((), ())), (((2,), (1,)), ((), ())), (((2,), (0,)), ((0,), (0,)))]
)
def test_axes_that_it_does_not_know_are_refused(numbers: Any) -> None:
    with pytest.raises(ValueError, match="the last axes of x meet the first"):
        matrix_product(jnp.ones((4, 4, 4)), jnp.ones((4, 4, 4)), numbers)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what XLA makes of it on a CPU")
@pytest.mark.parametrize("case", ["feed forward", "to heads", "from heads"])
def test_its_gradient_transposes_nothing(case: str) -> None:
    small_x, small_matrix, axes = SHAPES[case]
    x, matrix = (tuple(16 * n for n in shape) for shape in (small_x, small_matrix))
    numbers = dimensions(x, axes)

    def gradient(x: Array, matrix: Array, cotangent: Array) -> Array:
        return jax.vjp(lambda m: matrix_product(x, m, numbers), matrix)[1](cotangent)[0]

    shapes = x, matrix, (*x[:-axes], *matrix[axes:])
    described = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program: Any = jax.jit(gradient).lower(*described).compile().as_text()
    assert " dot(" in program
    assert " transpose(" not in program
    assert " copy(" not in program


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what XLA makes of it on a CPU")
def test_nor_does_that_of_logits() -> None:
    embedding = SharedEmbedding(SMALL, 300)
    x, cotangent = (jax.ShapeDtypeStruct((8, 16, n), jnp.float32) for n in (SMALL.d_model, 300))
    params = {"params": {"table": jax.ShapeDtypeStruct((300, SMALL.d_model), jnp.float32)}}

    def gradient(params: Any, x: Array, cotangent: Array) -> Any:
        logits = lambda p: embedding.apply(p, x, method="logits")  # noqa: E731
        return jax.vjp(logits, params)[1](cotangent)[0]

    program: Any = jax.jit(gradient).lower(params, x, cotangent).compile().as_text()
    assert " dot(" in program
    assert " transpose(" not in program
    assert " copy(" not in program
