"""Convert parameters to and from the names and layout of Hugging Face's `MarianMTModel`.

Marian's positional encodings have the same angles as the paper's, but all sines come before all
cosines, whereas the paper interleaves sines and cosines. Permuting the channels of all parameters
in the same way gives an equivalent model.

Shapes: D d_model, N vocab_size.
"""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_jax.config import ModelConfig
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.sharing.parameters import Arrays, Shapes, flatten_params, unflatten_params

SHARED = "model.shared.weight"
BIAS = "final_logits_bias"
TABLES = {
    "source_embedding.table": "model.encoder.embed_tokens.weight",
    "embedding.table": "model.decoder.embed_tokens.weight",
    "output_embedding.table": "lm_head.weight",
}
POSITIONS = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
FEED_FORWARD = {"inner": "fc1", "outer": "fc2"}
NORMS = {
    "after_self_attention": "self_attn_layer_norm",
    "after_cross_attention": "encoder_attn_layer_norm",
    "after_feed_forward": "final_layer_norm",
}


class Module(NamedTuple):
    """A module that exists both in this package and in Marian."""

    name: str
    """The module's name in this package, such as `encoder_0.self_attention.query`."""
    marian_name: str
    reads_channels: bool
    """Whether the channels (d_model) are the last axis of Marian's weight. If not, the channels are
    the first axis of the weight and the only axis of the bias."""


def to_marian(config: ModelConfig, params: Params, vocabulary: Vocabulary | None = None) -> Arrays:
    """Convert parameters or gradients to Marian's names and order; missing biases become zeros."""
    params = flatten_params(params)
    channels = channel_order(config.d_model)
    arrays = {}
    for name, marian_name in table_names(params).items():
        table = params[name]
        arrays[marian_name] = np.empty(table.shape, table.dtype)
        arrays[marian_name][_marian_ids(vocabulary, name)] = table[:, channels]
    table = params["embedding.table"]
    arrays[BIAS] = np.zeros((1, len(table)), table.dtype)
    if "output_bias" in params:
        arrays[BIAS][0, _marian_ids(vocabulary, "output_bias")] = params["output_bias"]
    for module in _modules(config):
        if "norm" in module.marian_name:
            weight = params[f"{module.name}.scale"]
        else:
            # A kernel has shape [in, out], and Marian's weight has shape [out, in]. Either axis of
            # the kernel can be split into heads.
            kernel = params[f"{module.name}.kernel"]
            inputs = kernel.shape[0] if module.reads_channels else -1
            weight = kernel.reshape(inputs, -1 if module.reads_channels else config.d_model).T
        bias = params.get(f"{module.name}.bias", np.zeros(len(weight), weight.dtype)).reshape(-1)
        if module.reads_channels:
            weight = weight[:, channels]
        else:
            weight, bias = weight[channels], bias[channels]
        arrays[f"{module.marian_name}.weight"] = np.ascontiguousarray(weight)
        arrays[f"{module.marian_name}.bias"] = bias
    return arrays


def marian_shapes(config: ModelConfig, shapes: Shapes) -> Shapes:
    """Return the shapes of the arrays from `to_marian`, given the shapes from `flatten_params`."""
    marian_shapes = {theirs: shapes[ours] for ours, theirs in table_names(shapes).items()}
    marian_shapes[BIAS] = (1, shapes["embedding.table"][0])
    for module in _modules(config):
        weight = bias = (config.d_model,)
        if "norm" not in module.marian_name:
            size = math.prod(shapes[f"{module.name}.kernel"])
            outputs = size // config.d_model if module.reads_channels else config.d_model
            weight, bias = (outputs, size // outputs), (outputs,)
        marian_shapes[f"{module.marian_name}.weight"] = weight
        marian_shapes[f"{module.marian_name}.bias"] = bias
    return marian_shapes


def from_marian(config: ModelConfig, arrays: Arrays, vocabulary: Vocabulary) -> Params:
    """Invert `to_marian`, without attention and logit biases unless the config enables them."""
    channels = np.argsort(channel_order(config.d_model))
    names = {"embedding.table": SHARED} if SHARED in arrays else TABLES
    params = {
        name: arrays[marian_name][_marian_ids(vocabulary, name)][:, channels]
        for name, marian_name in names.items()
        if marian_name in arrays
    }
    if config.output_bias:
        params["output_bias"] = arrays[BIAS][0][_marian_ids(vocabulary, "output_bias")]
    for module in _modules(config):
        weight, bias = arrays[f"{module.marian_name}.weight"], arrays[f"{module.marian_name}.bias"]
        if module.reads_channels:
            weight = weight[:, channels]
        else:
            weight, bias = weight[channels], bias[channels]
        if "norm" in module.marian_name:
            params[f"{module.name}.scale"] = weight
            params[f"{module.name}.bias"] = bias
            continue
        kernel, is_attention = np.ascontiguousarray(weight.T), "_attention" in module.name
        if is_attention and not module.reads_channels:
            kernel = kernel.reshape(-1, config.d_v, config.d_model)
        elif is_attention:
            kernel = kernel.reshape(len(kernel), -1, config.d_k)
            bias = bias.reshape(-1, config.d_k)
        params[f"{module.name}.kernel"] = kernel
        if config.attention_bias or not is_attention:
            params[f"{module.name}.bias"] = bias
    return unflatten_params(params)


def has_attention_bias(arrays: Arrays) -> bool:
    """Return whether any attention projection has a nonzero bias."""
    attentions = tuple(f".{name}." for name in ATTENTIONS.values())
    names = (k for k in arrays if k.endswith("bias") and any(a in k for a in attentions))
    return any(np.any(arrays[name]) for name in names)


def table_names(names: Collection[str]) -> dict[str, str]:
    """Return Marian's names for the embedding tables among these names of parameters."""
    if "source_embedding.table" not in names:
        return {"embedding.table": SHARED}
    return {ours: theirs for ours, theirs in TABLES.items() if ours in names}


def channel_order(d_model: int) -> Int[np.ndarray, " D"]:
    """Return each Marian channel's index in the paper's order. Marian puts sines before cosines."""
    return np.arange(d_model).reshape(-1, 2).T.reshape(-1)


def _marian_ids(vocabulary: Vocabulary | None, name: str) -> Int[np.ndarray, " N"] | slice:
    """Return Marian's ID for each row of a parameter, or `slice(None)` if the order is the same."""
    if vocabulary is None:
        return slice(None)
    tokenizer = vocabulary.source if name.startswith("source") else vocabulary.target
    return slice(None) if tokenizer.table is None else np.array(tokenizer.table.order)


def _modules(config: ModelConfig) -> Iterator[Module]:
    for stack, depth in zip(("encoder", "decoder"), config.layers_per_stack, strict=True):
        for index in range(depth):
            yield from _layer_modules(stack, f"{stack}_{index}", f"model.{stack}.layers.{index}")
        if config.layer_norm == "pre":
            yield Module(f"{stack}_norm", f"model.{stack}.layer_norm", False)


def _layer_modules(stack: str, layer: str, marian_layer: str) -> Iterator[Module]:
    for name, marian_name in NORMS.items():
        if stack == "decoder" or name != "after_cross_attention":
            yield Module(f"{layer}.{name}.norm", f"{marian_layer}.{marian_name}", False)
    for name, marian_name in FEED_FORWARD.items():
        yield Module(
            f"{layer}.feed_forward.{name}", f"{marian_layer}.{marian_name}", name == "inner"
        )
    for attention, marian_attention in ATTENTIONS.items():
        if stack == "encoder" and attention == "cross_attention":
            continue
        for name, marian_name in PROJECTIONS.items():
            yield Module(
                f"{layer}.{attention}.{name}",
                f"{marian_layer}.{marian_attention}.{marian_name}",
                name != "output",
            )
