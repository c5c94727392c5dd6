"""Convert a model to CTranslate2's format, using CTranslate2's model specification.

The exported folder contains `model.bin`, `config.json`, the vocabulary as JSON, and the
SentencePiece models `source.spm` and `target.spm`.

Shapes: P positions, D d_model.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from transformer_jax.config import ModelConfig
from transformer_jax.files import new_folder
from transformer_jax.inference.trained_run import Run
from transformer_jax.model import inspect
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.optional import import_optional
from transformer_jax.sharing.expressible import check_ctranslate2
from transformer_jax.sharing.marian_format import write_tokenizers
from transformer_jax.special_tokens import PAD

Quantization = Literal["float32", "bfloat16", "int8"]
# A CTranslate2 specification, which describes a model, a layer, or a module. The type is `Any`
# because CTranslate2 is optional.
Specification = Any
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}
# The logit bias of a token that a CTranslate2 model must never predict.
NEVER = -1e4
# CTranslate2 raises an error for positions past the end of its position table. By default, it
# truncates a source after 1,024 tokens and ends a translation after 256 tokens.
MIN_POSITIONS = 1024


def export_ctranslate2(run: Run, path: Path, quantization: Quantization = "float32") -> None:
    """Export a run's model to a new folder that `ctranslate2.Translator` can load."""
    specification = make_specification(run, quantization)
    with new_folder(path) as folder:
        specification.save(str(folder))
        write_tokenizers(folder, run.vocabulary)


def make_specification(run: Run, quantization: Quantization = "float32") -> Specification:
    """Return the model as CTranslate2's `TransformerSpec`."""
    check_ctranslate2(run.config)
    specs = import_optional("ctranslate2.specs")
    config, vocabulary = run.config.model, run.vocabulary
    # Round to bfloat16 here, because CTranslate2 needs PyTorch for this conversion.
    dtype = jnp.dtype("bfloat16" if quantization == "bfloat16" else "float32")
    params = jax.tree.map(lambda x: np.asarray(x, dtype), without_padding(run).params)
    is_pre, d_model = config.layer_norm == "pre", config.num_heads * config.d_k
    options = {
        "pre_norm": is_pre,
        "head_dim": None if d_model == config.d_model else config.d_k,
        "activation": getattr(specs.Activation, ACTIVATIONS[config.activation]),
    }
    encoder_depth, decoder_depth = config.layers_per_stack
    encoder = specs.TransformerEncoderSpec(encoder_depth, config.num_heads, **options)
    decoder = specs.TransformerDecoderSpec(decoder_depth, config.num_heads, **options)
    for stack, name in ((encoder, "encoder"), (decoder, "decoder")):
        for index, layer in enumerate(stack.layer):
            _set_layer(layer, params[f"{name}_{index}"], config)
        if is_pre:
            _set_norm(stack.layer_norm, params[f"{name}_norm"])
        stack.position_encodings.encodings = position_table(run, name).astype(dtype)
    target = params["embedding"]
    source, output = params.get("source_embedding", target), params.get("output_embedding", target)
    # Copy the arrays, because quantization changes them in place.
    encoder.embeddings[0].weight = source["table"].copy()
    decoder.embeddings.weight = target["table"].copy()
    decoder.projection.weight = output["table"].copy()
    if "output_bias" in params:
        decoder.projection.bias = params["output_bias"]
    spec = specs.TransformerSpec(encoder, decoder)
    spec.register_source_vocabulary(vocabulary.source.token_texts)
    spec.register_target_vocabulary(vocabulary.target.token_texts)
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.config.add_source_eos = True
    spec.config.decoder_start_token = vocabulary.target.token_texts[config.decoder_start_id]
    spec.validate()
    spec.optimize(quantization)
    return spec


def without_padding(run: Run) -> Run:
    """Return the run or, if padding is the start token, a copy that never predicts padding.

    CTranslate2 can exclude a token only through a logit bias, so a large negative bias reduces the
    probability of padding to zero.
    """
    if run.config.model.decoder_start != "padding":
        return run
    bias = jnp.asarray(run.params["output_bias"]).at[PAD].set(NEVER)
    return replace(run, params={**run.params, "output_bias": bias})


def position_table(run: Run, stack: str) -> Float[np.ndarray, "P D"]:
    """Return the positional encodings that the "encoder" or the "decoder" adds to embeddings."""
    config = run.config.model
    source, target = config.max_lengths
    longest = source if stack == "encoder" else target
    if target is None or longest is None:
        longest = max(config.max_length + run.config.decode.max_extra_length, MIN_POSITIONS)
    return np.array(inspect.position_table(run.model, run.params, longest, stack))


def _set_layer(layer: Specification, params: Params, config: ModelConfig) -> None:
    _set_attention(layer.self_attention, params, "self_attention", config)
    if "cross_attention" in params:
        _set_attention(layer.attention, params, "cross_attention", config)
    _set_linear(layer.ffn.linear_0, params["feed_forward"]["inner"])
    _set_linear(layer.ffn.linear_1, params["feed_forward"]["outer"])
    _set_norm(layer.ffn.layer_norm, params["after_feed_forward"]["norm"])


def _set_attention(spec: Specification, params: Params, name: str, config: ModelConfig) -> None:
    query, key, value, output = (params[name][x] for x in ("query", "key", "value", "output"))
    # CTranslate2 concatenates projections that share an input.
    groups = [(query, key, value)] if name == "self_attention" else [(query,), (key, value)]
    for linear, group in zip(spec.linear, groups, strict=False):
        _set_linear(linear, *group)
    _set_linear(spec.linear[-1], output, num_input_axes=2)
    _set_norm(spec.layer_norm, params[f"after_{name}"]["norm"])
    if config.attention_score == "dot_product":
        spec.queries_scale = np.float32(1)


def _set_linear(spec: Specification, *modules: Params, num_input_axes: int = 1) -> None:
    """Concatenate `Dense` modules (kernels [in, out], biases [out]) into one linear layer."""
    kernels = [module["kernel"] for module in modules]
    matrices = [x.reshape(math.prod(x.shape[:num_input_axes]), -1).T for x in kernels]
    spec.weight = np.ascontiguousarray(np.concatenate(matrices))
    if "bias" in modules[0]:
        spec.bias = np.concatenate([module["bias"].reshape(-1) for module in modules])


def _set_norm(spec: Specification, params: Params) -> None:
    spec.gamma, spec.beta = params["scale"], params["bias"]
