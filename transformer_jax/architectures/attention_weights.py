"""The attention weights of recurrent and convolutional models, keyed by kind.

Shapes: B batch, S source positions, T target positions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.model.transformer import EncoderDecoder, Intermediates, Params


def _record(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> Intermediates:
    """Return the recorded attention weights of each module."""
    _, variables = model.apply({"params": params}, source, target, mutable=["intermediates"])
    return variables["intermediates"]


def recurrent_weights(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "1 B 1 T S"]]:
    """Return the "cross" weights of a recurrent decoder, or {} for a decoder without attention."""
    if model.config.attention_score == "none":
        return {}
    # The scan stacks one array [B, 1, 1, S] for each target position.
    weights = _record(model, params, source, target)["decoder"]["attention"]["weights"][0]
    return {"cross": jnp.moveaxis(weights[:, :, 0, 0], 0, 1)[None, :, None]}


def convolutional_weights(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "layers B 1 T S"]]:
    """Return the "cross" weights of all decoder layers."""
    layers = _record(model, params, source, target)
    names = [f"decoder_{i}" for i in range(model.config.num_layers)]
    return {"cross": jnp.stack([layers[name]["attention"]["weights"][0] for name in names])}
