"""Write models that Hugging Face's `MarianMTModel` can load, and convert Marian's settings."""

import json
from pathlib import Path

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.token_table import TokenTable
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import ConfigError, StorageError
from transformer_jax.files import JsonObject, new_folder
from transformer_jax.inference.trained_run import Run
from transformer_jax.sharing.expressible import check_exportable
from transformer_jax.sharing.marian_parameters import to_marian
from transformer_jax.sharing.marian_settings import unsupported
from transformer_jax.sharing.parameters import write_arrays
from transformer_jax.special_tokens import EOS, PAD

# Layer normalization in Marian always uses this epsilon.
LAYER_NORM_EPSILON = 1e-5
# The name of each activation function in `config.json`, mapped to its name in this package.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
# The required value of each field in config.json, and the value assumed if the field is missing.
REQUIRED: dict[str, tuple[object, object]] = {
    "scale_embedding": (True, False),
    "static_position_embeddings": (True, True),
    "normalize_embedding": (False, False),
}


def model_settings(
    config: ModelConfig,
    num_positions: int,
    table: TokenTable | None = None,
    *,
    vocab_size: int,
    source_vocab_size: int | None = None,
) -> dict[str, object]:
    """Return the content of Marian's config.json; `table` is the target's token table."""
    widths = {"ffn_dim": config.d_ff, "attention_heads": config.num_heads}
    encoder_layers, decoder_layers = config.layers_per_stack
    is_shared = config.tie_embeddings == "all" and source_vocab_size is None
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "activation_function": config.activation,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        **{f"{stack}_{k}": n for k, n in widths.items() for stack in ("encoder", "decoder")},
        "d_model": config.d_model,
        "vocab_size": source_vocab_size or vocab_size,
        "decoder_vocab_size": vocab_size,
        "max_position_embeddings": num_positions,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": is_shared,
        "tie_word_embeddings": config.tie_embeddings != "none",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "dtype": "float32",
        **special_tokens(config, table),
    }


def generation_settings(run: Run) -> dict[str, object]:
    """Return the content of generation_config.json, which `generate` uses by default."""
    config, decode = run.config.model, run.config.decode
    tokens = special_tokens(config, run.vocabulary.target.table)
    settings: dict[str, object] = {
        "num_beams": decode.beam_size,
        "max_length": config.max_length + decode.max_extra_length,
        **tokens,
    }
    if decode.length_penalty == "power":
        settings["length_penalty"] = decode.length_penalty_alpha
    if config.decoder_start == "padding":
        settings["bad_words_ids"] = [[tokens["pad_token_id"]]]
    return settings


def special_tokens(config: ModelConfig, table: TokenTable | None) -> dict[str, int]:
    """Return the IDs of the special tokens, keyed by their names in Marian's settings."""
    ids = range(EOS + 1) if table is None else table.order
    padding, begin, end = ids[PAD], ids[config.decoder_start_id], ids[EOS]
    tokens = {"pad_token_id": padding, "eos_token_id": end, "forced_eos_token_id": end}
    tokens["decoder_start_token_id"] = begin
    return tokens if begin == padding else {**tokens, "bos_token_id": begin}


def write_tokenizers(folder: Path, vocabulary: Vocabulary) -> None:
    """Write the SentencePiece models under Marian's file names."""
    (folder / "source.spm").write_bytes(vocabulary.source.model)
    (folder / "target.spm").write_bytes(vocabulary.target.model)


def read_tokens(path: Path, settings: JsonObject, tokens: list[str]) -> TokenTable:
    """Return a vocabulary's token table, with the special tokens from the settings."""
    padding, end = settings.get("pad_token_id"), settings.get("eos_token_id")
    start = settings.get("decoder_start_token_id")
    for field, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>")):
        token_id = tokens.index(token) if token in tokens else "no ID"
        if settings.get(field) != token_id or isinstance(settings.get(field), bool):
            rule = f"the vocabulary has {token_id} for {token}"
            raise unsupported(path / "config.json", field, settings.get(field), rule)
    if (forced := settings.get("forced_eos_token_id")) not in (end, None):
        rule = f"this package requires {end}"
        raise unsupported(path / "config.json", "forced_eos_token_id", forced, rule)
    if not isinstance(start, int):
        raise StorageError(f"{path / 'config.json'} is invalid: decoder_start_token_id is missing")
    unknown = tokens.index("<unk>") if "<unk>" in tokens else -1
    begin = None if start == padding else start
    table = TokenTable(tuple(tokens), padding, begin, end, unknown)  # type: ignore[arg-type]
    table.check(str(path / "config.json"))
    return table


def read_config(
    path: Path, settings: JsonObject, generation: JsonObject, vocabulary: Vocabulary
) -> Config:
    """Return a Marian model's config, with all biases enabled and the search of `generate`."""
    _check_expressible(path, settings)
    decode = _read_search(path / "generation_config.json", generation)
    max_length = settings.get("max_position_embeddings", 1024)
    try:
        d_model, num_heads = settings["d_model"], settings["encoder_attention_heads"]
        for field, value in (("d_model", d_model), ("encoder_attention_heads", num_heads)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {str(value)[:50]}")
        width = d_model // num_heads
        if width * num_heads != d_model:
            raise ValueError(f"d_model {d_model} is not a multiple of {num_heads} heads")
        depth, decoder_depth = settings["encoder_layers"], settings["decoder_layers"]
        table = vocabulary.target.table
        model = {
            "num_layers": depth,
            "num_decoder_layers": None if decoder_depth == depth else decoder_depth,
            "d_ff": settings["encoder_ffn_dim"],
            "activation": ACTIVATIONS[settings.get("activation_function", "gelu")],
            "d_model": d_model,
            "num_heads": num_heads,
            "d_k": width,
            "d_v": width,
            "dropout": settings.get("dropout", 0.1),
            "attention_dropout": settings.get("attention_dropout", 0.0),
            "activation_dropout": settings.get("activation_dropout", 0.0),
            "max_length": max_length,
            "attention_bias": True,
            "output_bias": True,
            "decoder_start": "padding" if table is not None and table.begin is None else "bos",
            "layer_norm": "pre" if settings.get("normalize_before", False) else "post",
            "layer_norm_epsilon": LAYER_NORM_EPSILON,
            "tie_embeddings": _tie_embeddings(settings, vocabulary),
        }
        data = {"corpus": "text", **vocabulary.sizes}
        default = ModelConfig().max_length
        data["max_length"] = min(default, max_length) if isinstance(max_length, int) else default
        return Config().change(model=model, data=data, decode=decode)
    except (KeyError, ValueError, TypeError, ConfigError) as error:
        raise StorageError(f"{path / 'config.json'} is invalid: {error}") from error


def _read_search(path: Path, generation: JsonObject) -> dict[str, object]:
    decode: dict[str, object] = {"length_penalty": "power"}
    for name, field in (("num_beams", "beam_size"), ("length_penalty", "length_penalty_alpha")):
        decode[field] = generation.get(name, 1)
        try:
            Config().change(decode=decode)
        except ConfigError as error:
            raise StorageError(f"{path} has an invalid {name}: {error}") from error
    return decode


def _check_expressible(path: Path, settings: JsonObject) -> None:
    required = dict(REQUIRED)
    for name in ("ffn_dim", "attention_heads"):
        required[f"decoder_{name}"] = settings.get(f"encoder_{name}"), None
    # For pre-norm models, the transformers library stores both normalize_before and
    # add_final_layer_norm.
    if settings.get("add_final_layer_norm") is not None:
        required["add_final_layer_norm"] = settings.get("normalize_before", False), None
    if settings.get("share_encoder_decoder_embeddings", True):
        required["tie_word_embeddings"] = True, True
    for field, (expected, default) in required.items():
        value = settings.get(field, default)
        if value != expected or type(value) is not type(expected):
            rule = f"this package requires {expected}"
            raise unsupported(path / "config.json", field, value, rule)
    activation = settings.get("activation_function", "gelu")
    if activation not in list(ACTIVATIONS):
        rule = f"this package supports only {', '.join(ACTIVATIONS)}"
        raise unsupported(path / "config.json", "activation_function", activation, rule)


def _tie_embeddings(settings: JsonObject, vocabulary: Vocabulary) -> str:
    if not settings.get("tie_word_embeddings", True):
        return "none"
    is_shared = settings.get("share_encoder_decoder_embeddings", True)
    return "all" if is_shared or not vocabulary.is_shared else "target"


MIN_POSITIONS = 512


def export_marian(run: Run, path: Path) -> None:
    """Export a run's model in float32 to a new folder in Marian's format."""
    check_exportable(run.config, "marian")
    config, vocabulary = run.config.model, run.vocabulary
    table = vocabulary.target.table
    num_positions = max(config.max_length + run.config.decode.max_extra_length, MIN_POSITIONS)
    documents = {
        "config.json": model_settings(config, num_positions, table, **vocabulary.sizes),
        "generation_config.json": generation_settings(run),
        "tokenizer_config.json": {
            "tokenizer_class": "MarianTokenizer",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_length,
            "separate_vocabs": not vocabulary.is_shared,
        },
        "vocab.json": _token_ids(vocabulary.source),
    }
    if not vocabulary.is_shared:
        documents["target_vocab.json"] = _token_ids(vocabulary.target)
    with new_folder(path) as folder:
        arrays = to_marian(config, run.params, vocabulary)
        write_arrays(folder / "model.safetensors", arrays, {"format": "pt"})
        for name, content in documents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{text}\n", "utf-8")
        write_tokenizers(folder, run.vocabulary)


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    tokens = tokenizer.token_texts if tokenizer.table is None else tokenizer.table.tokens
    return {text: token for token, text in enumerate(tokens)}
