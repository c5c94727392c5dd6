"""Test that the rows for more text have larger models."""

import itertools

import pytest

from transformer_jax.config import Config
from transformer_jax.config.loading import load_config, load_rows
from transformer_jax.errors import ConfigError

ROWS = load_rows("text")


def test_more_text_gets_more_layers_steps_and_tokens_and_less_dropout() -> None:
    configs = [row.config for row in ROWS.values()]
    for less, more in itertools.pairwise(configs):
        assert less.model.num_layers < more.model.num_layers
        assert less.data.vocab_size < more.data.vocab_size
        assert less.data.batch_tokens < more.data.batch_tokens
        assert less.train.steps < more.train.steps
        assert less.model.dropout >= more.model.dropout
    assert ROWS["base"].config.model == Config().model


def test_without_a_row_a_message_names_the_rows() -> None:
    with pytest.raises(ConfigError, match=r"available: 300, 10k, 100k, base"):
        load_config("text")
