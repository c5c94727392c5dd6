"""Test that every valid corpus name has a class and the right BLEU tokenizer."""

from typing import get_args

from example_configs import kind_of

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import CORPORA, bleu_tokenizer


def test_each_corpus_of_the_config_has_a_class() -> None:
    assert set(CORPORA) == set(get_args(kind_of(DataConfig, "corpus")))


def test_number_words_are_scored_by_character_unless_the_config_says_otherwise() -> None:
    assert bleu_tokenizer(DataConfig()) == "char"
    assert bleu_tokenizer(DataConfig(bleu_tokenizer="13a")) == "13a"
    assert bleu_tokenizer(DataConfig(corpus="tfds")) == "auto"
    assert bleu_tokenizer(DataConfig(corpus="tfds", bleu_tokenizer="intl")) == "intl"
