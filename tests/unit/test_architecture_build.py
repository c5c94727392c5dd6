"""Test that configs of different architectures can be compared."""

import pytest

from transformer_jax.architectures.build import build_model
from transformer_jax.config import Config
from transformer_jax.config.loading import load_config, load_rows
from transformer_jax.model.inspect import parameter_counts


def count_parameters(config: Config) -> int:
    model = build_model(config.model, config.data.vocab_size, config.data.source_vocab_size)
    return parameter_counts(model)["total"]


def peak_learning_rate(config: Config) -> float:
    train = config.train
    return train.learning_rate_scale / (config.model.d_model * train.warmup_steps) ** 0.5


@pytest.mark.slow
def test_the_rows_of_the_recurrence_sweep_have_equal_sizes() -> None:
    counts = {name: count_parameters(row.config) for name, row in load_rows("recurrence").items()}
    assert max(counts.values()) < 1.015 * min(counts.values()), counts


@pytest.mark.slow
def test_the_recurrent_parser_has_the_size_and_budget_of_the_small_transformer() -> None:
    small, rnn = load_config("parsing_small"), load_config("parsing_rnn")
    assert count_parameters(rnn) == pytest.approx(count_parameters(small), rel=0.015)
    assert (rnn.data, rnn.decode) == (small.data, small.decode)
    unlike = {"clip_norm", "learning_rate_scale"}
    assert {k: v for k, v in rnn.to_dict()["train"].items() if k not in unlike} == {
        k: v for k, v in small.to_dict()["train"].items() if k not in unlike
    }
    assert peak_learning_rate(rnn) == pytest.approx(peak_learning_rate(small))


def test_a_recurrent_row_has_the_name_of_its_attention_score() -> None:
    models = {name: row.config.model for name, row in load_rows("recurrence").items()}
    scores = {n: m.attention_score for n, m in models.items() if m.architecture == "rnn"}
    assert scores == {name: name for name in ("none", "additive", "general")}
