"""Test that models of every architecture can be compared."""

from typing import Any

from transformer_jax.architectures.build import build_model
from transformer_jax.config.loading import load_rows
from transformer_jax.model.inspect import parameter_counts


def test_the_rows_of_the_recurrence_sweep_have_equal_sizes() -> None:
    rows: dict[str, Any] = load_rows("recurrence")
    counts = {
        name: parameter_counts(build_model(row.config.model, row.config.data.vocab_size))["total"]
        for name, row in rows.items()
    }
    assert max(counts.values()) < 1.015 * min(counts.values()), counts
