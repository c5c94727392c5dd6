"""Products with a trained matrix, at each position alike."""

import math
from typing import Any

import jax
from jaxtyping import Array, Float


def matrix_product(
    x: Float[Array, "..."],
    matrix: Float[Array, "..."],
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """Multiply all positions with a matrix, as rows of one matrix themselves.

    The same as `jax.lax.dot_general`, in place of which Flax's layers take it. There the gradient
    by the matrix is a sum over two axes, the batch's and the positions', and XLA on a CPU
    transposes all that it sums, in copies.

    Args:
        x: [B, T, in], whose last axes meet the matrix's first.
        matrix: [in, out]; `in` and `out` may be several axes.
        dimension_numbers: which axes meet, as Flax says it; one of each if it says nothing.
        precision: as `jax.lax.dot_general` takes it.
        preferred_element_type: the dtype of sums and result.

    Returns:
        [B, T, out].

    Raises:
        ValueError: other axes meet than the last of x and the first of the matrix.
    """
    axes = 1
    if dimension_numbers is not None:
        (own, others), batched = dimension_numbers
        axes = len(others)
        wanted = range(x.ndim - axes, x.ndim), range(axes)
        if (*own,) != (*wanted[0],) or (*others,) != (*wanted[1],) or any(batched):
            raise ValueError(
                f"the last axes of x meet the first of the matrix, not {own}, {others}"
            )
    size = math.prod(matrix.shape[:axes])
    rows = jax.lax.dot(
        x.reshape(-1, size),
        matrix.reshape(size, -1),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return rows.reshape(*x.shape[:-axes], *matrix.shape[axes:])
