"""Test that the list of splits matches the `Split` type."""

from typing import get_args

from transformer_jax.data.splits import SPLITS, Split


def test_splits_lists_every_split() -> None:
    assert get_args(Split) == SPLITS
