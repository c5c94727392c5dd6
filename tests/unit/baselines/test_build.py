"""Test that configs of different architectures have comparable sizes and training budgets."""

import pytest

from transformer_jax.baselines.build import count_parameters
from transformer_jax.config import Config
from transformer_jax.config.loading import load_config, load_rows


def peak_learning_rate(config: Config) -> float:
    train = config.train
    return train.learning_rate_scale / (config.model.d_model * train.warmup_steps) ** 0.5


@pytest.mark.slow
def test_the_rows_of_the_recurrence_sweep_have_equal_sizes() -> None:
    rows = load_rows("recurrence")
    counts = {name: count_parameters(row.config)["total"] for name, row in rows.items()}
    assert max(counts.values()) < 1.015 * min(counts.values()), counts


@pytest.mark.slow
def test_the_recurrent_parser_has_the_size_and_budget_of_the_small_transformer() -> None:
    small, rnn = load_config("parsing_small"), load_config("parsing_rnn")
    sizes = [count_parameters(config)["total"] for config in (rnn, small)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.015)
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
