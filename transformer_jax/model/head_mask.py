"""Mask attention heads, as in Michel et al. (2019), without changing the model.

Shapes: L layers, H heads. The first axis of a mask corresponds to the kinds of attention, in the
order of `KINDS`.
"""

import re

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from transformer_jax.errors import UsageError
from transformer_jax.model.encoder_decoder import Params

KINDS = ("encoder", "decoder", "cross")
"""The kinds of attention: encoder self-attention, decoder self-attention, and cross-attention."""

# For each kind of attention, the stack that uses it and the name of its module in each layer.
MODULES = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}


def mask_heads(params: Params, mask: Bool[Array, "3 L H"] | Bool[np.ndarray, "3 L H"]) -> Params:
    """Return a copy of the parameters in which heads whose mask is False have no effect.

    Head i contributes head_i W_i^O to the output of its sub-layer (section 3.2.2), where W_i^O are
    the rows of W^O that belong to head i. Zeroing the rows of a head is exactly equivalent to
    zeroing the head's output. The other parameters are shared with `params`, not copied.

    Raises:
        UsageError: the model has no attention heads, the two stacks have different numbers of
            layers, or the mask's shape does not match the model's layers and heads.
    """
    if "self_attention" not in params.get("encoder_0", {}):
        raise UsageError(
            "this model has no attention heads: only those of a Transformer can be masked"
        )
    num_layers, num_decoder_layers = (
        sum(re.fullmatch(rf"{stack}_\d+", name) is not None for name in params)
        for stack in ("encoder", "decoder")
    )
    if num_layers != num_decoder_layers:
        raise UsageError(
            f"heads can be masked only if both stacks have the same number of layers, but this "
            f"model has {num_layers} and {num_decoder_layers}"
        )
    num_heads = params["encoder_0"]["self_attention"]["output"]["kernel"].shape[0]
    expected = (len(KINDS), num_layers, num_heads)
    if mask.shape != expected:
        raise UsageError(f"the head mask must have the shape {expected}, got {mask.shape}")
    masked = dict(params)
    for kind, of_layers in zip(KINDS, mask, strict=True):
        stack, module = MODULES[kind]
        for i, of_heads in enumerate(of_layers):
            layer = masked[f"{stack}_{i}"]
            output = layer[module]["output"]
            kernel = jnp.where(of_heads[:, None, None], output["kernel"], 0.0)
            attention = {**layer[module], "output": {**output, "kernel": kernel}}
            masked[f"{stack}_{i}"] = {**layer, module: attention}
    return masked
