"""Read a folder in Hugging Face's `MarianMTModel` format, which `marian_format` also writes.

The folder is untrusted. This module executes nothing in it, rejects links, special files, and
oversized files, and checks all names and shapes before it reads the arrays. It also rejects
everything that this package's model cannot express.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import ConfigError, StorageError, UsageError
from transformer_jax.inference.trained_run import Run
from transformer_jax.interop.marian_format import (
    ATTENTIONS,
    LAYER_NORM_EPSILON,
    from_marian,
    marian_shapes,
    special_tokens,
)
from transformer_jax.interop.parameters import Shapes, expected_shapes, read_arrays
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import digest_params
from transformer_jax.runs.run_directory import (
    MAX_DESCRIPTION,
    MAX_TOKENIZER,
    RunDirectory,
    check_no_links,
)

# safetensors rejects longer headers.
MAX_HEADER = 100_000_000
# transformers recomputes these arrays or also stores them under another name.
IGNORED = r"lm_head\.weight|model\.(encoder|decoder)\.embed_(positions|tokens)\.weight"
# The required values of fields in config.json. A missing field has transformers' default value.
DEFAULTS = {
    "activation_function": "gelu",
    "scale_embedding": False,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
REQUIRED = {
    "activation_function": "relu",
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}


def is_marian(path: Path) -> bool:
    """Return whether a folder contains a model in transformers' format instead of a run."""
    return (path / "config.json").is_file() and not (path / "run.json").exists()


def read_marian(path: Path) -> Run:
    """Read a model in Marian's format. The result's folder path is `path`.

    Raises:
        UsageError: this package's model cannot express a field. The message names the field.
        StorageError: a file is missing, invalid, too large, a link, or a special file, or it does
            not match the other files.
    """
    try:
        check_no_links(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    settings = _read_json(path / "config.json", MAX_DESCRIPTION)
    _check_expressible(path, settings)
    vocabulary = _read_vocabulary(path)
    if settings.get("vocab_size") != len(vocabulary.target):
        raise StorageError(
            f"{path / 'config.json'} has the vocab_size {settings.get('vocab_size')}, but "
            f"source.spm has {len(vocabulary.target)} tokens"
        )
    # In this package, attention biases are optional, so omit them if they are all zero.
    config = _make_config(path, settings, len(vocabulary.target))
    weights = path / "model.safetensors"
    model = build_transformer(config.model, **vocabulary.sizes)
    # A config can require more parameters than fit in memory, so check the size before creating
    # arrays.
    shapes = marian_shapes(config.model, expected_shapes(model))
    _check_size(weights, _max_bytes(config.model, shapes))
    arrays, _ = read_arrays(weights, shapes, IGNORED)
    if np.any(arrays["final_logits_bias"]):
        raise UsageError(
            f"{weights} has biases in final_logits_bias, which this model does not have"
        )
    names = tuple(f".{name}." for name in ATTENTIONS.values())
    biases = (x for k, x in arrays.items() if k.endswith("bias") and any(n in k for n in names))
    if not any(np.any(bias) for bias in biases):
        config = config.change(model={"attention_bias": False})
    params = jax.tree.map(jnp.asarray, from_marian(config.model, arrays))
    folder = RunDirectory(path, config, vocabulary, f"imported-{digest_params(params)[:16]}")
    return Run(folder, params, (0,))


def _check_expressible(path: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("model_type") != "marian":
        raise UsageError(f"{path} is not a Marian model: model_type {settings.get('model_type')!r}")
    required: dict[str, object] = {**REQUIRED, **special_tokens()}
    for name in ("layers", "ffn_dim", "attention_heads"):
        required[f"decoder_{name}"] = settings.get(f"encoder_{name}")
    for field, expected in required.items():
        value = settings.get(field, DEFAULTS.get(field))
        if value != expected or type(value) is not type(expected):
            raise UsageError(
                f"{path / 'config.json'} has {field} {str(value)[:50]}, but the model here "
                f"requires {expected}"
            )


def _make_config(path: Path, settings: Mapping[str, Any], vocab_size: int) -> Config:
    max_length = settings.get("max_position_embeddings")
    try:
        d_model, num_heads = settings["d_model"], settings["encoder_attention_heads"]
        width = d_model // num_heads
        if width * num_heads != d_model:
            raise ValueError(f"d_model {d_model} is not a multiple of {num_heads} heads")
        model = {
            "num_layers": settings["encoder_layers"],
            "d_ff": settings["encoder_ffn_dim"],
            "d_model": d_model,
            "num_heads": num_heads,
            "d_k": width,
            "d_v": width,
            "dropout": settings.get("dropout", 0.1),
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout", 0.0),
            "max_length": max_length,
            "attention_bias": True,
            "layer_norm_epsilon": LAYER_NORM_EPSILON,
        }
        default = ModelConfig().max_length
        data = {"corpus": "text", "vocab_size": vocab_size}
        data["max_length"] = min(default, max_length) if isinstance(max_length, int) else default
        return Config().change(model=model, data=data)
    except (KeyError, ValueError, TypeError, ZeroDivisionError, ConfigError) as error:
        raise StorageError(f"{path / 'config.json'} is invalid: {error}") from error


def _read_vocabulary(path: Path) -> Vocabulary:
    source, target = (_read(path / f"{side}.spm", MAX_TOKENIZER) for side in ("source", "target"))
    if source != target:
        raise UsageError(f"{path} has two SentencePiece models, but the model here requires one")
    tokenizer = Tokenizer.load_untrusted(source, str(path / "source.spm"))
    if _read_json(path / "vocab.json", MAX_TOKENIZER) != {
        piece: token for token, piece in enumerate(tokenizer.pieces)
    }:
        raise UsageError(f"{path / 'vocab.json'} has other tokens or ids than source.spm")
    return Vocabulary.shared(tokenizer)


def _read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    try:
        data = json.loads(_read(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise StorageError(f"{path} is not a JSON object")
    return data


def _read(path: Path, max_bytes: int) -> bytes:
    _check_size(path, max_bytes)
    return path.read_bytes()


def _check_size(path: Path, max_bytes: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if size > max_bytes:
        raise StorageError(f"{path} is invalid: it has more than {max_bytes >> 20} MiB")


def _max_bytes(config: ModelConfig, shapes: Shapes) -> int:
    """Return the size limit of the weights file: the header and all arrays, even ignored ones."""
    table, positions = shapes["model.shared.weight"], (config.max_length, config.d_model)
    sizes = map(math.prod, [*shapes.values(), *3 * [table], *2 * [positions]])
    return 4 * sum(sizes) + MAX_HEADER
