"""Test that settings in a Marian folder that change translations are never ignored silently."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from opus_mt import model_settings

from transformer_jax.errors import UsageError
from transformer_jax.progress import Note
from transformer_jax.sharing.marian_settings import (
    FREE_GENERATION,
    FREE_MODEL,
    NEUTRAL_GENERATION,
    check_settings,
)

PATH = Path("folder")
PADDING = 49
SETTINGS = model_settings(PADDING + 1)


def check(
    generation: dict[str, Any],
    settings: dict[str, Any] = SETTINGS,
    tokenizer: dict[str, Any] | None = None,
) -> None:
    check_settings(PATH, settings, generation, tokenizer or {})


def test_the_settings_of_public_models_are_accepted() -> None:
    legacy = {"num_beams": 6, "max_length": 512, "bad_words_ids": [[PADDING]]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check({}, SETTINGS | legacy)
        check({**legacy, "renormalize_logits": True, "forced_eos_token_id": 0, "use_cache": True})
        check({}, tokenizer={"source_lang": "en", "target_lang": "de", "separate_vocabs": False})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[PADDING], [5]]),
        ("bad_words_ids", [[0, PADDING]]),
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("do_sample", True),
        ("early_stopping", True),
        ("suppress_tokens", [7]),
        ("begin_suppress_tokens", [7]),
        ("forced_bos_token_id", 7),
        ("forced_eos_token_id", 7),
        ("force_words_ids", [[7]]),
        ("constraints", [1]),
        ("sequence_bias", [[[7], -1.0]]),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("encoder_repetition_penalty", 1.2),
        ("repetition_penalty", 1.2),
        ("no_repeat_ngram_size", 3),
        ("encoder_no_repeat_ngram_size", 3),
        ("min_length", 5),
        ("min_new_tokens", 5),
        ("max_new_tokens", 5),
        ("max_time", 1.0),
        ("stop_strings", ["."]),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 1.5),
        ("watermarking_config", {"bias": 2.0}),
        ("token_healing", True),
        ("dola_layers", "low"),
        ("eos_token_id", [0, 5]),
        ("a_setting_of_a_later_release", 1),
    ],
)
def test_a_setting_that_changes_translations_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"folder/generation_config.json has {name} "):
        check({"num_beams": 4, name: value})
    if name != "eos_token_id":
        with pytest.raises(UsageError, match=rf"folder/config.json has {name} "):
            check({}, SETTINGS | {name: value})


@pytest.mark.parametrize("name", sorted(NEUTRAL_GENERATION))
def test_a_setting_that_is_off_is_accepted(name: str) -> None:
    for value in (None, *NEUTRAL_GENERATION[name]):
        check({"num_beams": 4, name: value})


def test_padding_can_be_forbidden_only_if_the_search_forbids_it() -> None:
    settings = SETTINGS | {"decoder_start_token_id": 0}
    with pytest.raises(UsageError, match="bad_words_ids"):
        check({"bad_words_ids": [[PADDING]]}, settings)


@pytest.mark.parametrize("name", ["pruned_heads", "quantization_config", "attention_sinks"])
def test_an_unknown_field_of_the_model_is_refused_unless_it_is_off(name: str) -> None:
    check({}, SETTINGS | {name: None})
    with pytest.raises(UsageError, match=rf"config.json has {name} .* does not support it"):
        check({}, SETTINGS | {name: {"0": [1]}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sp_model_kwargs", {"enable_sampling": True}),
        ("additional_special_tokens", ["<x>"]),
        ("unk_token", "[UNK]"),
        ("added_tokens_decoder", {"0": {"content": "</s>"}, "7": {"content": "<x>"}}),
    ],
)
def test_a_setting_that_changes_the_tokens_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"tokenizer_config.json has {name} "):
        check({}, tokenizer={name: value})


def test_a_limit_and_a_clean_up_of_spaces_are_noted() -> None:
    with pytest.warns(Note, match="max_length 20, but here a translation may be as long as"):
        check({"max_length": 20})
    with pytest.warns(Note, match="clean_up_tokenization_spaces"):
        check({}, tokenizer={"clean_up_tokenization_spaces": True})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_tables_list_every_setting_of_the_transformers_library() -> None:
    transformers: Any = pytest.importorskip("transformers")
    generation = set(transformers.GenerationConfig().to_dict())
    assert generation <= NEUTRAL_GENERATION.keys() | FREE_GENERATION
    model = transformers.MarianConfig().to_dict()
    known = FREE_MODEL | FREE_GENERATION
    assert {name for name, value in model.items() if value} <= known
