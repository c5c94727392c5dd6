"""Every kind of corpus that a config can choose exists, and has the right BLEU tokenizer."""

from typing import get_args

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import CORPORA, bleu_tokenizer


def test_each_corpus_of_the_config_has_a_class() -> None:
    assert set(CORPORA) == set(get_args(DataConfig.__annotations__["corpus"]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "char"),
        ({"corpus": "tfds"}, "13a"),
        ({"corpus": "tfds", "bleu_tokenizer": "intl"}, "intl"),
        ({"bleu_tokenizer": "13a"}, "13a"),
    ],
)
def test_number_words_are_scored_by_character_unless_the_config_says_otherwise(
    options: dict[str, str], expected: str
) -> None:
    assert bleu_tokenizer(DataConfig(**options)) == expected
