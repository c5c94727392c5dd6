"""Matrix products and lookups whose fastest form depends on the platform or the data type.

All forms of an operation compute the same function, up to rounding.
Shapes: B batch, T positions, N vocab_size; `in` and `out` each stand for one or more axes.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.target_platform import target_platform

Multiply = Callable[..., Float[Array, "..."]]
"""A function that multiplies two arrays and accepts `preferred_element_type`."""


Sums = tuple[Array, Array, Array, Array]


def matmul(
    x: Float[Array, "..."],
    matrix: Float[Array, "..."],
    *,
    num_input_axes: int = 1,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Multiply x of shape [B, T, in] or [B, in] by a matrix of shape [in, out]."""
    if target_platform() == "cpu":
        # The gradient with respect to `matrix` is a sum over the batch and position axes. For a sum
        # over two axes, XLA's CPU backend copies transposed operands, so flatten the two axes.
        input_size = math.prod(matrix.shape[:num_input_axes])
        flat, flat_matrix = x.reshape(-1, input_size), matrix.reshape(input_size, -1)
        y = jax.lax.dot(flat, flat_matrix, preferred_element_type=preferred_element_type)
        return y.reshape(*x.shape[:-num_input_axes], *matrix.shape[num_input_axes:])
    # On other platforms, do not flatten the axes: on a TPU, for example, flattening causes copies.
    inputs = tuple(range(num_input_axes))
    contracted = tuple(range(x.ndim - num_input_axes, x.ndim)), inputs
    return jax.lax.dot_general(
        x, matrix, (contracted, ((), ())), preferred_element_type=preferred_element_type
    )


def multiply_to_float32(
    multiply: Multiply, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the product of x and y in float32 or higher precision, even if x is in bfloat16.

    See `sum_dtype`. In contrast, the result of a `Dense` layer has the layer's `dtype`.

    The cotangent of the product is also in float32 or higher precision. On a GPU, the backward pass
    rounds this cotangent to the dtype of x. Without this rounding, the backward pass would
    multiply the float32 cotangent by a bfloat16 operand in float32, at a fraction of the speed.
    """
    if target_platform() == "gpu":
        return _multiply_and_round_cotangent(multiply, x, y)
    return multiply(x, y, preferred_element_type=sum_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_and_round_cotangent(
    multiply: Multiply, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    return multiply(x, y, preferred_element_type=sum_dtype(x))


def _multiply_forward(
    multiply: Multiply, x: Float[Array, "..."], y: Float[Array, "..."]
) -> tuple[Float[Array, "..."], tuple[Float[Array, "..."], Float[Array, "..."]]]:
    return _multiply_and_round_cotangent(multiply, x, y), (x, y)


def _multiply_backward(
    multiply: Multiply,
    inputs: tuple[Float[Array, "..."], Float[Array, "..."]],
    cotangent: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    # Without `preferred_element_type`, the product and its cotangent have the dtype of x.
    return jax.vjp(multiply, *inputs)[1](cotangent.astype(inputs[0].dtype))


_multiply_and_round_cotangent.defvjp(_multiply_forward, _multiply_backward)


def normal(stddev: float) -> Callable[[Array, tuple[int, ...]], Float[Array, "..."]]:
    """Return an initializer that draws from N(0, stddev^2).

    `jax.nn.initializers.normal` multiplies by two constants, which XLA merges within a single
    program. The barrier prevents this merging, so that a parameter has the same bits whether its
    initializer is compiled alone or with others.
    """

    def initialize(rng: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
        values = jax.lax.optimization_barrier(jax.random.normal(rng, shape))
        return values * jnp.asarray(stddev, values.dtype)

    return initialize


def sum_dtype(x: Float[Array, "..."]) -> jax.typing.DTypeLike:
    """Return the dtype for sums over x: at least float32, because bfloat16 sums lose precision."""
    return jnp.promote_types(x.dtype, jnp.float32)


class Summary(NamedTuple):
    """Three numbers that summarize the logits of a position for the computation of the loss."""

    log_total: Float[Array, "B T"]
    """The logarithm of the sum of the exponentials of the logits."""
    total: Float[Array, "B T"]
    target: Float[Array, "B T"]


def summarize(logits: Float[Array, "B T N"], target: Int[Array, "B T"]) -> Summary:
    """Reduce the logits of each position, which have at least 32 bits, to three numbers.

    On a GPU, this function takes only as long as reading the logits. Separate reductions would read
    the logits four times, and the gradient of a gather would need another array as large as the
    logits. On a CPU, a gather is faster.
    """
    if target_platform() == "gpu":
        return _summarize_in_one_pass(logits, target)
    log_total, total = jax.nn.logsumexp(logits, axis=-1), logits.sum(axis=-1)
    return Summary(log_total, total, jnp.take_along_axis(logits, target[..., None], -1)[..., 0])


@jax.custom_vjp
def _summarize_in_one_pass(logits: Float[Array, "B T N"], target: Int[Array, "B T"]) -> Summary:
    def combine(left: Sums, right: Sums) -> Sums:
        maximum = jnp.maximum(left[0], right[0])
        first, second = (x[1] * jnp.exp(x[0] - maximum) for x in (left, right))
        return maximum, first + second, left[2] + right[2], left[3] + right[3]

    target_logits = jnp.where(_is_target(logits, target), logits, 0)
    operands = logits, jnp.ones_like(logits), logits, target_logits
    # A finite minimum avoids the difference of two infinities.
    initial = tuple(jnp.asarray(x, logits.dtype) for x in (jnp.finfo(logits.dtype).min, 0, 0, 0))
    maximum, scaled, *sums = jax.lax.reduce(operands, initial, combine, (logits.ndim - 1,))
    return Summary(maximum + jnp.log(scaled), *sums)


def _is_target(logits: Float[Array, "B T N"], target: Int[Array, "B T"]) -> Bool[Array, "B T N"]:
    return jax.lax.broadcasted_iota(target.dtype, logits.shape, 2) == target[..., None]


Residuals = tuple[Float[Array, "B T N"], Int[Array, "B T"], Float[Array, "B T"]]


def _summarize_forward(
    logits: Float[Array, "B T N"], target: Int[Array, "B T"]
) -> tuple[Summary, Residuals]:
    summary = _summarize_in_one_pass(logits, target)
    return summary, (logits, target, summary.log_total)


def _summarize_backward(
    residuals: Residuals, cotangent: Summary
) -> tuple[Float[Array, "B T N"], None]:
    logits, target, log_total = residuals
    log_total_cotangent, total_cotangent, target_cotangent = (x[..., None] for x in cotangent)
    gradient = log_total_cotangent * jnp.exp(logits - log_total[..., None]) + total_cotangent
    return gradient + jnp.where(_is_target(logits, target), target_cotangent, 0), None


_summarize_in_one_pass.defvjp(_summarize_forward, _summarize_backward)
