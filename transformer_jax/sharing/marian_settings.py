"""Reject unsupported settings in a Marian folder if they change translations.

The tables list what is allowed. Any other setting is rejected unless it is off, so that settings
from later releases of the transformers library are never ignored silently.
"""

from collections.abc import Mapping
from pathlib import Path

from transformer_jax.errors import UsageError
from transformer_jax.files import JsonObject
from transformer_jax.progress import note

# Settings of `generate` that this package's search does not support, with the values that turn them
# off. A value of None also turns each setting off.
NEUTRAL_GENERATION: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("do_sample", "token_healing"), (False,)),
    "early_stopping": (False, "never"),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "constraints"), ([],)),
    **dict.fromkeys(("force_words_ids", "stop_strings"), ([],)),
    **dict.fromkeys(("sequence_bias", "watermarking_config"), ({},)),
    **dict.fromkeys(("forced_bos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("max_new_tokens", "max_time", "dola_layers"), ()),
}
# Settings of `generate` that other functions read, or that affect only sampling, speed, memory, or
# what `generate` returns in addition to translations.
FREE_GENERATION = {
    *("num_beams", "length_penalty", "max_length", "bad_words_ids", "forced_eos_token_id"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "compile_config", "disable_compile", "prefill_chunk_size"),
    *("continuous_batching_config", "is_assistant", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("speculation_type", "use_mtp", "_from_model_config", "transformers_version"),
}
# Fields in config.json that other functions read, or that do not affect translations.
FREE_MODEL = {
    *("d_model", "vocab_size", "decoder_vocab_size", "max_position_embeddings"),
    *(f"{stack}_{k}" for stack in ("encoder", "decoder") for k in ("ffn_dim", "attention_heads")),
    *("encoder_layers", "decoder_layers", "encoder_layerdrop", "decoder_layerdrop"),
    *("activation_function", "dropout", "attention_dropout", "activation_dropout"),
    *("scale_embedding", "static_position_embeddings", "normalize_embedding", "normalize_before"),
    *("add_final_layer_norm", "share_encoder_decoder_embeddings", "tie_word_embeddings"),
    *("model_type", "architectures", "_name_or_path", "name_or_path", "tokenizer_class"),
    *("transformers_version", "dtype", "torch_dtype", "init_std", "num_hidden_layers"),
    *("extra_pos_embeddings", "classif_dropout", "classifier_dropout", "_num_labels"),
    *("num_labels", "id2label", "label2id", "problem_type", "is_encoder_decoder", "return_dict"),
    *("gradient_checkpointing", "chunk_size_feed_forward", "_attn_implementation"),
}
SPECIAL_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}


def check_settings(
    path: Path, settings: JsonObject, generation: JsonObject, tokenizer: JsonObject
) -> None:
    """Reject settings that change translations and that this package cannot express."""
    is_separate = bool(generation)
    file = path / ("generation_config.json" if is_separate else "config.json")
    if not is_separate:
        known = NEUTRAL_GENERATION.keys() | FREE_GENERATION
        generation = {name: value for name, value in settings.items() if name in known}
    _check_generation(file, settings, generation)
    for name, value in settings.items():
        is_known = name in FREE_MODEL or name in NEUTRAL_GENERATION or name in FREE_GENERATION
        if not is_known and value:
            raise unsupported(path / "config.json", name, value, "this package does not support it")
    _check_tokenizer(path / "tokenizer_config.json", tokenizer)
    limits = (settings.get("max_position_embeddings"), tokenizer.get("model_max_length"))
    _note_limit(file, generation.get("max_length"), *limits)


def _check_generation(file: Path, settings: JsonObject, generation: JsonObject) -> None:
    for name, value in generation.items():
        neutral = NEUTRAL_GENERATION.get(name)
        if value is None or name in FREE_GENERATION or (neutral and value in neutral):
            continue
        rule = f"supports only {neutral[0]}" if neutral else "does not support it"
        raise unsupported(file, name, value, f"this package's search {rule}")
    end, padding = settings.get("eos_token_id"), settings.get("pad_token_id")
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if (value := generation.get(name)) not in (None, settings.get(name)):
            rule = f"config.json has {str(settings.get(name))[:50]}"
            raise unsupported(file, name, value, rule)
    if (forced := generation.get("forced_eos_token_id")) not in (None, end):
        rule = f"this package requires {end}"
        raise unsupported(file, "forced_eos_token_id", forced, rule)
    # The search never predicts padding if the decoder starts with padding.
    allowed = [[padding]] if settings.get("decoder_start_token_id") == padding else []
    if any(words not in allowed for words in generation.get("bad_words_ids") or []):
        words = generation["bad_words_ids"]
        rule = f"this package's search supports only {allowed}"
        raise unsupported(file, "bad_words_ids", words, rule)


def _note_limit(file: Path, limit: object, *source_limits: object) -> None:
    """Issue a note if `generate` allows fewer tokens in a translation than in a source."""
    numbers = [x for x in source_limits if isinstance(x, int | float)]
    if isinstance(limit, int) and numbers and limit < min(numbers):
        note(
            f"{file} has max_length {limit}, but here a translation may be as long as its source "
            "plus decode.max_extra_length tokens"
        )


def _check_tokenizer(file: Path, tokenizer: JsonObject) -> None:
    for name, expected in SPECIAL_TOKENS.items():
        token = tokenizer.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token not in (None, expected):
            raise unsupported(file, name, token, f"this package requires {expected}")
    added = tokenizer.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        contents = [x.get("content") for x in added.values() if isinstance(x, Mapping)]
        if extra := [x for x in contents if x not in SPECIAL_TOKENS.values()]:
            raise unsupported(file, "added_tokens_decoder", extra, "this package lacks them")
    for name in ("sp_model_kwargs", "additional_special_tokens", "extra_special_tokens"):
        if value := tokenizer.get(name):
            raise unsupported(file, name, value, "this package does not support it")
    if tokenizer.get("clean_up_tokenization_spaces") is True:
        note(f"{file} has clean_up_tokenization_spaces True, but this package keeps these spaces")


def unsupported(file: Path, field: str, value: object, rule: str) -> UsageError:
    """Return the error for a setting that this package does not support."""
    return UsageError(f"{file} has {field} {str(value)[:50]}, but {rule}")
