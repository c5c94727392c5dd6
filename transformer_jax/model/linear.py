"""Linear layers, applied at every position (the projections in sections 3.2.2 and 3.3).

Shapes: B batch, T positions; `in` and `out` each stand for one or more axes.
"""

import math

from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.model.operations import matmul


class Dense(nn.Module):
    """A linear layer, x W + b, at each position.

    The layer is equivalent to `nn.DenseGeneral`, except that `matmul` chooses the fastest form of
    the matrix product for each platform. W is initialized with Glorot uniform values, and b with
    zeros. The paper does not specify an initializer. The weights for H heads of width K are
    initialized like a single matrix [D, H K].
    """

    features: tuple[int, ...]
    """The sizes of the output axes; `(H, K)` splits the result into heads."""
    dtype: str
    """The dtype of the computation. Parameters are float32, or float64 within `jax.enable_x64`."""
    num_input_axes: int = 1
    """The number of trailing axes of x to contract; a value of 2 merges the heads."""
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiply x [B, T, in] by the kernel [in, out] and add the bias: [B, T, out]."""
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
