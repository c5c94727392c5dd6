"""Write a model to a folder that transformers' `MarianMTModel` and `MarianTokenizer` can open.

Marian's positional encodings use the paper's angles, but put all sines before all cosines instead
of interleaving them. Permuting the channels of all parameters in the same way gives an equivalent
model.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_jax.config import ModelConfig
from transformer_jax.inference.trained_run import Run
from transformer_jax.interop.expressible import check_marian
from transformer_jax.interop.folders import new_folder, write_tokenizers
from transformer_jax.interop.optional import import_optional
from transformer_jax.interop.parameters import Arrays, Shapes, flatten_params, unflatten_params
from transformer_jax.model.transformer import Params
from transformer_jax.special_tokens import BOS, EOS, PAD

# Marian's layer normalization has this fixed epsilon.
LAYER_NORM_EPSILON = 1e-5
MIN_POSITIONS = 512
ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
FEED_FORWARD = {"inner": "fc1", "outer": "fc2"}
NORMS = {
    "after_self_attention": "self_attn_layer_norm",
    "after_cross_attention": "encoder_attn_layer_norm",
    "after_feed_forward": "final_layer_norm",
}


class Module(NamedTuple):
    """A module that exists in both programs."""

    name: str
    """The module's name in this package, such as `encoder_0.self_attention.query`."""
    marian_name: str
    reads_channels: bool
    """Whether the last axis of Marian's weight has size d_model."""
    writes_channels: bool
    """Whether the bias and the first axis of Marian's weight have size d_model."""


def export_marian(run: Run, path: Path) -> None:
    """Write a run to a new folder in Marian's format, in float32.

    Marian's `layer_norm_epsilon` is always `LAYER_NORM_EPSILON`.

    Raises:
        UsageError: the folder exists, safetensors is not installed, or Marian cannot express the
            model.
        StorageError: the folder cannot be written.
    """
    check_marian(run.config)
    save_file = import_optional("safetensors.numpy").save_file
    config, pieces = run.config.model, run.vocabulary.target.pieces
    num_positions = max(config.max_length + run.config.decode.max_extra_length, MIN_POSITIONS)
    documents = {
        "config.json": model_settings(config, len(pieces), num_positions),
        "generation_config.json": generation_settings(run),
        "tokenizer_config.json": {
            "tokenizer_class": "MarianTokenizer",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_length,
        },
        "vocab.json": {piece: token for token, piece in enumerate(pieces)},
    }
    with new_folder(path) as folder:
        save_file(to_marian(config, run.params), folder / "model.safetensors", {"format": "pt"})
        for name, content in documents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{text}\n", "utf-8")
        write_tokenizers(folder, run.vocabulary)


def model_settings(config: ModelConfig, vocab_size: int, num_positions: int) -> dict[str, object]:
    """Return the content of Marian's config.json."""
    sizes = {"layers": config.num_layers, "ffn_dim": config.d_ff}
    sizes["attention_heads"] = config.num_heads
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "activation_function": "relu",
        **{f"{stack}_{k}": n for k, n in sizes.items() for stack in ("encoder", "decoder")},
        "d_model": config.d_model,
        "vocab_size": vocab_size,
        "decoder_vocab_size": vocab_size,
        "max_position_embeddings": num_positions,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "dtype": "float32",
        **special_tokens(),
    }


def generation_settings(run: Run) -> dict[str, object]:
    """Return the content of generation_config.json, which `generate` uses by default."""
    config, decode = run.config.model, run.config.decode
    return {
        "num_beams": decode.beam_size,
        "max_length": config.max_length + decode.max_extra_length,
        **special_tokens(),
    }


def special_tokens() -> dict[str, int]:
    """Return the IDs of the special tokens, keyed by the names in Marian's settings."""
    return {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "forced_eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }


def to_marian(config: ModelConfig, params: Params) -> Arrays:
    """Return parameters, or their gradients, with Marian's names and order of channels."""
    params = flatten_params(params)
    order = channel_order(config.d_model)
    table = params["embedding.table"]
    arrays = {
        "model.shared.weight": np.ascontiguousarray(table[:, order]),
        "final_logits_bias": np.zeros((1, len(table)), table.dtype),
    }
    for module in _modules(config):
        if "norm" in module.marian_name:
            arrays[f"{module.marian_name}.weight"] = params[f"{module.name}.scale"][order]
            arrays[f"{module.marian_name}.bias"] = params[f"{module.name}.bias"][order]
            continue
        # A kernel has shape [in, out], and Marian's weight has shape [out, in]. Either axis can be
        # split into heads.
        kernel = params[f"{module.name}.kernel"]
        inputs = kernel.shape[0] if module.reads_channels else -1
        weight = kernel.reshape(inputs, -1 if module.reads_channels else config.d_model).T
        bias = params.get(f"{module.name}.bias", np.zeros(len(weight), weight.dtype)).reshape(-1)
        if module.reads_channels:
            weight = weight[:, order]
        if module.writes_channels:
            weight, bias = weight[order], bias[order]
        arrays[f"{module.marian_name}.weight"] = np.ascontiguousarray(weight)
        arrays[f"{module.marian_name}.bias"] = bias
    return arrays


def marian_shapes(config: ModelConfig, shapes: Shapes) -> Shapes:
    """Return the shapes of `to_marian`'s arrays, given the shapes of `flatten_params`'s arrays."""
    table = shapes["embedding.table"]
    marian_shapes = {"model.shared.weight": table, "final_logits_bias": (1, table[0])}
    for module in _modules(config):
        weight = bias = (config.d_model,)
        if "norm" not in module.marian_name:
            size = math.prod(shapes[f"{module.name}.kernel"])
            outputs = size // config.d_model if module.reads_channels else config.d_model
            weight, bias = (outputs, size // outputs), (outputs,)
        marian_shapes[f"{module.marian_name}.weight"] = weight
        marian_shapes[f"{module.marian_name}.bias"] = bias
    return marian_shapes


def from_marian(config: ModelConfig, arrays: Arrays) -> Params:
    """Invert `to_marian`: return the parameters that it converted to `arrays`.

    If the config has no attention biases, omit Marian's.
    """
    order = np.argsort(channel_order(config.d_model))
    params = {"embedding.table": arrays["model.shared.weight"][:, order]}
    for module in _modules(config):
        weight, bias = arrays[f"{module.marian_name}.weight"], arrays[f"{module.marian_name}.bias"]
        if "norm" in module.marian_name:
            params[f"{module.name}.scale"], params[f"{module.name}.bias"] = (
                weight[order],
                bias[order],
            )
            continue
        if module.reads_channels:
            weight = weight[:, order]
        if module.writes_channels:
            weight, bias = weight[order], bias[order]
        kernel, is_attention = np.ascontiguousarray(weight.T), "_attention" in module.name
        if is_attention and module.writes_channels:
            kernel = kernel.reshape(config.num_heads, config.d_v, -1)
        elif is_attention:
            kernel = kernel.reshape(len(kernel), config.num_heads, -1)
            bias = bias.reshape(config.num_heads, -1)
        params[f"{module.name}.kernel"] = kernel
        if config.attention_bias or not is_attention:
            params[f"{module.name}.bias"] = bias
    return unflatten_params(params)


def channel_order(d_model: int) -> Int[np.ndarray, " D"]:
    """Return the paper's channel for each of Marian's channels: the sines, and then the cosines."""
    return np.arange(d_model).reshape(-1, 2).T.reshape(-1)


def _modules(config: ModelConfig) -> Iterator[Module]:
    """Yield all modules of both stacks except the embedding."""
    for stack in ("encoder", "decoder"):
        for index in range(config.num_layers):
            layer, marian_layer = f"{stack}_{index}", f"model.{stack}.layers.{index}"
            for name, marian_name in NORMS.items():
                if stack == "decoder" or name != "after_cross_attention":
                    yield Module(
                        f"{layer}.{name}.norm", f"{marian_layer}.{marian_name}", False, True
                    )
            for name, marian_name in FEED_FORWARD.items():
                yield Module(
                    f"{layer}.feed_forward.{name}",
                    f"{marian_layer}.{marian_name}",
                    name == "inner",
                    name == "outer",
                )
            for attention, marian_attention in ATTENTIONS.items():
                if stack == "encoder" and attention == "cross_attention":
                    continue
                for name, marian_name in PROJECTIONS.items():
                    yield Module(
                        f"{layer}.{attention}.{name}",
                        f"{marian_layer}.{marian_attention}.{marian_name}",
                        name != "output",
                        name == "output",
                    )
