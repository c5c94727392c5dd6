"""Test that the rows of the recurrence sweep can be compared."""

from typing import Any

import pytest

from transformer_jax.architectures.build import build_model
from transformer_jax.config.loading import load_rows
from transformer_jax.model.inspect import parameter_counts


@pytest.mark.slow
def test_the_rows_of_the_recurrence_sweep_have_equal_sizes() -> None:
    rows: dict[str, Any] = load_rows("recurrence")
    counts = {
        name: parameter_counts(build_model(row.config.model, row.config.data.vocab_size))["total"]
        for name, row in rows.items()
    }
    assert max(counts.values()) < 1.015 * min(counts.values()), counts


def test_a_recurrent_row_has_the_name_of_its_attention_score() -> None:
    models = {name: row.config.model for name, row in load_rows("recurrence").items()}
    scores = {n: m.attention_score for n, m in models.items() if m.architecture == "rnn"}
    assert scores == {name: name for name in ("none", "additive", "general")}
