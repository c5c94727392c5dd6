import numpy as np
import pytest
from pictures import make_maps

from transformer_jax.errors import UsageError
from transformer_jax.visualization.attention_maps import AttentionMap, printable, select
from transformer_jax.visualization.attention_views import Selection


def test_unprintable_characters_become_escape_sequences() -> None:
    assert printable("\x1b[0m\u202e\u2028\ud800\n") == r"\x1b[0m\u202e\u2028\ud800\n"
    # Joiners, combining marks, and non-Latin scripts are ordinary text and must not be escaped.
    for text in ("👩\u200d👧", "e\u0301", "مرحبا", "<b>&'\"", "▁a b"):
        assert printable(text) == text


def test_each_axis_needs_a_token_for_each_position() -> None:
    weights = np.zeros((1, 1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="weights of 3 queries and 2 keys expected, got"):
        AttentionMap("", weights, ("a", "b", "c"), "", ("a", "b"), "")


def test_a_kind_without_weights_is_an_error() -> None:
    encoder_only = {"encoder": make_maps()["encoder"]}
    assert select(encoder_only, Selection("encoder"))[1].layer == 1
    with pytest.raises(UsageError, match="kind must be one of encoder, got 'cross'"):
        select(encoder_only, Selection())
