"""Read a model in the format of Hugging Face's `MarianMTModel`, such as a public opus-mt model.

This module treats the folder as untrusted and does not execute anything from it. The module rejects
links, special files, and oversized files, and it checks all names and shapes before it uses the
arrays. The module also rejects models that this package cannot express.
"""

import contextlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.backend import start_backend
from transformer_jax.config import ModelConfig
from transformer_jax.data.token_table import TableTokenizer
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary, check_model
from transformer_jax.errors import DataError, StorageError, UsageError, storage_errors
from transformer_jax.files import (
    MAX_JSON_BYTES,
    MAX_VOCABULARY_BYTES,
    JsonObject,
    check_no_links,
    check_size,
    read_json,
    read_limited,
)
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params, digest_params, parameter_shapes
from transformer_jax.model.positions import sinusoid
from transformer_jax.runs.run_folder import IMPORTED, RunFolder
from transformer_jax.sharing.marian_format import read_config, read_tokens
from transformer_jax.sharing.marian_parameters import (
    BIAS,
    POSITIONS,
    SHARED,
    TABLES,
    channel_order,
    from_marian,
    has_attention_bias,
    marian_shapes,
)
from transformer_jax.sharing.marian_settings import check_settings
from transformer_jax.sharing.parameters import FLOATS, Arrays, read_arrays, read_torch_arrays
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN

# The maximum size of a safetensors header in bytes. The safetensors library rejects larger headers.
MAX_HEADER = 100_000_000
# The maximum difference between stored positional encodings and the sinusoids. In bfloat16, the
# rounding errors are less than 2e-3.
MAX_POSITION_ERROR = 2e-3


def read_marian(path: Path) -> Run:
    """Read a model in Marian's format. In the returned run, `folder.path` is `path`."""
    start_backend()
    with storage_errors(f"{path} cannot be read"):
        check_no_links(path)
    settings = _read_json(path / "config.json")
    if settings.get("model_type") != "marian":
        kind = f"model_type {settings.get('model_type')!r}"
        if (path / "model.bin").exists():
            kind = "it is a CTranslate2 model; import the model that it was converted from"
        raise UsageError(f"{path} is not a Marian model: {kind}")
    vocabulary = _read_vocabulary(path, settings)
    generation = _read_optional_json(path / "generation_config.json")
    tokenizer_settings = _read_optional_json(path / "tokenizer_config.json")
    check_settings(path, settings, generation, tokenizer_settings)
    config = read_config(path, settings, generation or settings, vocabulary)
    max_length = int(min(config.model.max_length, _read_longest_source(path)))
    arrays = _read_weights(path, config.model, vocabulary)
    # Biases are optional in this package. Leave out biases that are zero. However, if padding is
    # the decoder's start token, keep the logit biases, because the export to CTranslate2 needs the
    # padding token's bias.
    config = config.change(
        data={"max_length": min(config.data.max_length, max_length)},
        model={
            "max_length": max_length,
            "attention_bias": has_attention_bias(arrays),
            "output_bias": config.model.decoder_start == "padding" or bool(np.any(arrays[BIAS])),
        },
    )
    params = from_marian(config.model, arrays, vocabulary)
    params = jax.tree.map(jnp.asarray, params)
    folder = RunFolder(path, config, vocabulary, f"{IMPORTED}{digest_params(params)[:16]}")
    return Run(folder, params, (0,))


def _read_longest_source(path: Path) -> float:
    file = path / "tokenizer_config.json"
    longest = _read_optional_json(file).get("model_max_length")
    if longest is None:
        return math.inf
    if type(longest) not in (int, float) or not longest >= 1:
        raise StorageError(
            f"{file} has the model_max_length {str(longest)[:50]}, which is not a positive number"
        )
    return longest


def _read_vocabulary(path: Path, settings: JsonObject) -> Vocabulary:
    models = [_read(path / f"{side}.spm", MAX_VOCABULARY_BYTES) for side in ("source", "target")]
    tokenizer_settings = _read_optional_json(path / "tokenizer_config.json")
    is_separate = tokenizer_settings.get("separate_vocabs", False) is True
    is_shared = settings.get("share_encoder_decoder_embeddings", True) is True
    if is_separate and is_shared:
        raise UsageError(
            f"{path / 'config.json'} has share_encoder_decoder_embeddings True, but "
            "tokenizer_config.json has separate_vocabs True"
        )
    names = ("vocab.json", "target_vocab.json" if is_separate else "vocab.json")
    fields = ("vocab_size", "vocab_size" if is_shared else "decoder_vocab_size")
    tokens = []
    for name, field in zip(names, fields, strict=True):
        tokens.append(_read_token_list(path / name))
        size = settings.get(field, settings.get("vocab_size"))
        if size != len(tokens[-1]):
            raise StorageError(
                f"{path / 'config.json'} has the {field} {str(size)[:50]}, but {name} has "
                f"{len(tokens[-1])} tokens"
            )
    has_two_models = models[0] != models[1]
    source, target = (
        _make_tokenizer(path, f"{side}.spm", model, settings, t, has_two_models and not is_separate)
        for side, model, t in zip(("source", "target"), models, tokens, strict=True)
    )
    return Vocabulary(source, target) if has_two_models or is_separate else Vocabulary.share(target)


def _make_tokenizer(
    path: Path, name: str, model: bytes, settings: JsonObject, tokens: list[str], needs_table: bool
) -> Tokenizer:
    """Return a tokenizer, with a token table if it is needed or if the model's IDs differ."""
    check_model(model, str(path / name))
    table = read_tokens(path, settings, tokens)
    has_package_ids = table[1:] == (PAD, BOS, EOS, UNKNOWN)
    if has_package_ids and not needs_table:
        # The model's special tokens may differ from this package's.
        with contextlib.suppress(DataError):
            tokenizer = Tokenizer(model)
            if tokenizer.token_texts == tokens:
                return tokenizer
    return TableTokenizer(model, table, str(path / name))


def _read_token_list(path: Path) -> list[str]:
    ids = _read_json(path, MAX_VOCABULARY_BYTES)
    tokens: list[str | None] = [None] * len(ids)
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < len(ids):
            raise StorageError(
                f"{path} has the ID {str(number)[:50]} for {token[:50]!r}, but the IDs of "
                f"{len(ids)} tokens are 0 to {len(ids) - 1}"
            )
        try:
            token.encode()
        except UnicodeEncodeError as error:
            # A JSON string can contain a lone surrogate.
            raise StorageError(f"{path} has the token {token[:50]!a}, which is not text") from error
        tokens[number] = token
    if None in tokens:
        raise StorageError(f"{path} has no token with the ID {tokens.index(None)}")
    return [token for token in tokens if token is not None]


def _read_weights(path: Path, config: ModelConfig, vocabulary: Vocabulary) -> Arrays:
    """Read the weights; check that positions are sinusoidal and that tied embeddings are equal."""
    model = build_transformer(config, **vocabulary.sizes)
    # A config can require more parameters than fit in memory, so check the file before
    # creating any arrays.
    shapes = marian_shapes(config, parameter_shapes(abstract_params(model)))
    optional: dict[str, tuple[int, ...]] = dict.fromkeys(
        POSITIONS, (config.max_length, config.d_model)
    )
    if SHARED in shapes:
        optional |= dict.fromkeys(TABLES.values(), shapes[SHARED])
    elif TABLES["output_embedding.table"] not in shapes:
        optional[TABLES["output_embedding.table"]] = shapes[TABLES["embedding.table"]]
    weights, torch_weights = path / "model.safetensors", path / "pytorch_model.bin"
    is_torch = not weights.exists() and torch_weights.exists()
    if not (weights.exists() or is_torch):
        raise StorageError(
            f"{path} needs model.safetensors or pytorch_model.bin, but it has neither: load the "
            "model with MarianMTModel.from_pretrained (from_flax=True and from_tf=True read other "
            "weights), and save it with save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    weights = torch_weights if is_torch else weights
    max_bytes = 4 * sum(map(math.prod, [*shapes.values(), *optional.values()])) + MAX_HEADER
    with storage_errors(f"{weights} cannot be read"):
        check_size(weights, max_bytes)
    if is_torch:
        arrays = read_torch_arrays(weights, shapes, optional, max_bytes)
    else:
        arrays, _ = read_arrays(weights, shapes, optional, types=FLOATS)
    arrays = {name: array.astype(np.float32, copy=False) for name, array in arrays.items()}
    for name, array in arrays.items():
        if not np.all(np.isfinite(array)):
            raise StorageError(f"{weights} has values in {name} that are not finite")
    _check_computed(weights, config, arrays)
    return arrays


def _check_computed(weights: Path, config: ModelConfig, arrays: Arrays) -> None:
    for name in POSITIONS:
        if name in arrays:
            positions = sinusoid(jnp.arange(config.max_length), config.d_model)
            expected = np.asarray(positions)[:, channel_order(config.d_model)]
            if not np.abs(arrays.pop(name) - expected).max() <= MAX_POSITION_ERROR:
                raise UsageError(
                    f"{weights} has {name} with values other than the sinusoids of "
                    "static_position_embeddings, which this package requires"
                )
    tied = SHARED if SHARED in arrays else TABLES["embedding.table"]
    names = list(TABLES.values()) if tied == SHARED else []
    if config.tie_embeddings != "none":
        names.append(TABLES["output_embedding.table"])
    for name in set(names) & arrays.keys():
        if not np.array_equal(arrays.pop(name), arrays[tied]):
            raise UsageError(
                f"{weights} has different values in {name} and {tied}, but config.json ties them"
            )


def _read_optional_json(path: Path) -> JsonObject:
    return _read_json(path) if path.exists() else {}


def _read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    with storage_errors(f"{path} cannot be read"):
        return read_json(path, max_bytes)


def _read(path: Path, max_bytes: int) -> bytes:
    with storage_errors(f"{path} cannot be read"):
        return read_limited(path, max_bytes)
