"""Linear layers (the projections of sections 3.2.2, 3.3, and 3.4), applied at every position.

Shapes: B batch, T positions; `in` and `out` each stand for one or more axes.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.model.target_platform import target_platform

Product = Callable[..., Float[Array, "..."]]
"""A function that multiplies two arrays and accepts `preferred_element_type`."""


def matmul(
    x: Float[Array, "..."],
    matrix: Float[Array, "..."],
    *,
    num_input_axes: int = 1,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Multiply x of shape [B, T, in] or [B, in] by a matrix of shape [in, out]."""
    if target_platform() == "cpu":
        # The gradient with respect to `matrix` sums over batch and positions, and XLA's CPU backend
        # copies transposed operands for sums over two axes, so flatten these axes.
        input_size = math.prod(matrix.shape[:num_input_axes])
        flat, flat_matrix = x.reshape(-1, input_size), matrix.reshape(input_size, -1)
        y = jax.lax.dot(flat, flat_matrix, preferred_element_type=preferred_element_type)
        return y.reshape(*x.shape[:-num_input_axes], *matrix.shape[num_input_axes:])
    # Elsewhere, do not flatten: on a TPU, flattening itself causes copies.
    inputs = tuple(range(num_input_axes))
    contracted = tuple(range(x.ndim - num_input_axes, x.ndim)), inputs
    return jax.lax.dot_general(
        x, matrix, (contracted, ((), ())), preferred_element_type=preferred_element_type
    )


def multiply_to_float32(
    product: Product, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the product of x and y in float32 or higher precision, even if x is in bfloat16.

    See `sum_dtype`. In contrast, the result of a `Dense` layer has the layer's `dtype`.

    The cotangent of the product is also in float32 or higher precision. On a GPU, the backward pass
    rounds this cotangent to the dtype of x. Otherwise, it would multiply the float32 cotangent by a
    bfloat16 operand in float32, at a fraction of the speed.
    """
    if target_platform() == "gpu":
        return _round_cotangent(product, x, y)
    return product(x, y, preferred_element_type=sum_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_cotangent(
    product: Product, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    return product(x, y, preferred_element_type=sum_dtype(x))


def _round_forward(
    product: Product, x: Float[Array, "..."], y: Float[Array, "..."]
) -> tuple[Float[Array, "..."], tuple[Float[Array, "..."], Float[Array, "..."]]]:
    return _round_cotangent(product, x, y), (x, y)


def _round_backward(
    product: Product,
    inputs: tuple[Float[Array, "..."], Float[Array, "..."]],
    cotangent: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    # Without `preferred_element_type`, the product and its cotangent have the dtype of x.
    return jax.vjp(product, *inputs)[1](cotangent.astype(inputs[0].dtype))


_round_cotangent.defvjp(_round_forward, _round_backward)


def sum_dtype(x: Float[Array, "..."]) -> jax.typing.DTypeLike:
    """Return the dtype for sums over x: at least float32, because bfloat16 sums lose precision."""
    return jnp.promote_types(x.dtype, jnp.float32)


class Dense(nn.Module):
    """A linear layer, x W + b, at each position.

    It equals `nn.DenseGeneral`, except that `matmul` chooses the fastest form for each platform. W
    is initialized with Glorot uniform values, and b with zeros. The paper does not specify an
    initializer. H heads of width K are initialized like a single matrix [D, H K].
    """

    features: tuple[int, ...]
    """The sizes of the output axes; `(H, K)` splits the result into heads."""
    dtype: str
    """The dtype of the computation. Parameters are float32."""
    num_input_axes: int = 1
    """The number of trailing axes of x to contract; 2 merges the heads."""
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x [B, T, in] times the kernel [in, out], plus the bias [out]: [B, T, out]."""
        shape = (*x.shape[-self.num_input_axes :], *self.features)
        kernel = self.param("kernel", _glorot_uniform, shape, self.num_input_axes)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        y = matmul(x, kernel, num_input_axes=self.num_input_axes)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features)
            y += bias.astype(self.dtype).reshape(*(1,) * (y.ndim - bias.ndim), *self.features)
        return y


def _glorot_uniform(rng: Array, shape: tuple[int, ...], num_input_axes: int) -> Float[Array, "..."]:
    flat_shape = math.prod(shape[:num_input_axes]), math.prod(shape[num_input_axes:])
    return nn.initializers.xavier_uniform()(rng, flat_shape).reshape(shape)
