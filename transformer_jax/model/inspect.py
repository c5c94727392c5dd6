"""Inspect a model: parameter shapes and counts, hidden states, and attention weights.

Shapes: B batch, S source positions, T target positions, D d_model, H heads.
"""

import hashlib
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.errors import UsageError
from transformer_jax.model.build import choose_components
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params, init_params, make_rng
from transformer_jax.model.transformer import Transformer


def abstract_params(model: EncoderDecoder) -> Params:
    """Return the shapes and dtypes of the parameters, without allocating them."""
    # `jit` caches the trace, so each model is traced only once.
    return init_params.eval_shape(model, jax.eval_shape(lambda: make_rng(0)))


def parameter_counts(model: EncoderDecoder) -> dict[str, int]:
    """Return the number of parameters in each kind of module (summed over layers) and in total."""
    counts: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        # For example, ("encoder_0", "after_self_attention", "norm", "scale") counts toward
        # "encoder.norms".
        module, *submodules = (entry.key for entry in path)
        stack, _, layer = module.partition("_")
        is_norm = any("norm" in name for name in submodules)
        kind = f"{stack}.{'norms' if is_norm else submodules[0]}" if layer.isdigit() else module
        counts[kind] += math.prod(leaf.shape)
    return {**dict(sorted(counts.items())), "total": counts.total()}


def parameter_shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, keyed by its flat name, such as `embedding.table`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves
    }


def check_params(model: EncoderDecoder, params: Params) -> None:
    """Check that `params` contains exactly the parameters that the model has.

    Flax itself ignores extra parameters, such as biases that the model does not have.

    Raises:
        UsageError: a parameter is missing or unknown, or has the wrong shape.
    """
    shapes, found = parameter_shapes(abstract_params(model)), parameter_shapes(params)
    for name in sorted(shapes.keys() | found.keys()):
        if name not in found:
            raise UsageError(f"the parameter {name} is missing")
        if name not in shapes:
            raise UsageError(f"the model has no parameter {name}")
        if found[name] != shapes[name]:
            rule = f"but the model needs {shapes[name]}"
            raise UsageError(f"the parameter {name} has the shape {found[name]}, {rule}")


def digest_params(params: Params) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes, and values of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def position_table(
    model: EncoderDecoder, params: Params, num_positions: int, stack: str = "encoder"
) -> Float[Array, "num_positions d_model"]:
    """Return the vector that a stack adds to the embeddings at each position (section 3.5).

    `stack` is "encoder" or "decoder". The table is all zeros if the model does not encode
    positions or if it encodes them in self-attention.
    """
    zeros = jnp.zeros((1, num_positions, model.config.d_model))

    def add(module: Any) -> Float[Array, "1 num_positions d_model"]:
        side = "source" if stack == "encoder" else "target"
        positions = getattr(module, f"{side}_positions", None)
        return zeros if positions is None else positions(zeros, jnp.arange(num_positions))

    return jnp.asarray(model.apply({"params": params}, method=add))[0]


def initial_position_table(
    model: EncoderDecoder, seed: int, num_positions: int
) -> Float[Array, "num_positions d_model"]:
    """Return the encoder's initial `position_table` in a run with this seed."""

    @jax.jit
    def initialize() -> Params:
        # XLA eliminates the other parameters as dead code.
        params = init_params(model, make_rng(seed))
        return {"source_positions": params.get("source_positions", {})}

    return position_table(model, initialize(), num_positions)


def attention_weights(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "layers B H _ _"]]:
    """Return all attention weights from a forward pass, as in figures 3 to 5 of the paper.

    The weights are stacked over layers: "encoder" [layers, B, H, S, S], "decoder" [layers, B, H, T,
    T], and "cross" [layers, B, H, T, S]. An architecture might have only some of these kinds of
    attention. The forward pass uses the `full` attention implementation in place of `blockwise` and
    `cudnn`, which do not record the weights.

    Raises:
        UsageError: an attention implementation in a user's file does not record the weights.
    """
    if isinstance(model, Transformer) and model.config.has_fused_attention:
        config = replace(model.config, attention_implementation="full")
        model = model.clone(config=config, components=choose_components(config))
    _, variables = model.apply({"params": params}, source, target, mutable=["intermediates"])
    try:
        return model.stack_weights(variables.get("intermediates") or {})
    except KeyError as error:
        raise UsageError(
            f"the attention implementation {model.config.attention_implementation} does not record "
            "its weights: its class must call self.to_weights, which records them"
        ) from error


# The modules whose outputs are the hidden states: the positional encodings and the layers.
STATE_MODULE = re.compile(r"(encoder|decoder)_\d+|(source|target)_positions")


def hidden_states(
    model: EncoderDecoder, params: Params, source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> dict[str, Float[Array, "states B _ D"]]:
    """Return the vectors that enter each layer and leave the last layer in a forward pass.

    The vectors are stacked: "encoder" [encoder layers + 1, B, S, D] and "decoder" [decoder layers +
    1, B, T, D]. The first entries are the embeddings with positional encodings.

    Raises:
        UsageError: the architecture has no stacks of layers with such vectors.
    """

    def is_state(module: nn.Module, method: str) -> bool:
        return method == "__call__" and STATE_MODULE.fullmatch("/".join(module.path)) is not None

    _, variables = model.apply(
        {"params": params}, source, target, capture_intermediates=is_state, mutable="intermediates"
    )
    found: Any = variables.get("intermediates") or {}
    names = ("source_positions", "encoder"), ("target_positions", "decoder")
    states: dict[str, Array] = {}
    for (first, stack), depth in zip(names, model.config.layers_per_stack, strict=True):
        modules = [first, *(f"{stack}_{i}" for i in range(depth))]
        try:
            states[stack] = jnp.stack([found[name]["__call__"][0] for name in modules])
        except KeyError as error:
            raise UsageError(
                f"the architecture {model.config.architecture} does not record its hidden states: "
                f"it has no module {error.args[0]}"
            ) from error
    return states
