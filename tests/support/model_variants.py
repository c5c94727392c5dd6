"""Model variants, and test cases for them."""

from collections.abc import Iterable
from typing import Any

import pytest

ODD_HEADS = {"num_heads": 3, "d_k": 4, "d_v": 5}

VARIANTS: list[dict[str, Any]] = [
    {"positions": "concatenated_sinusoidal"},
    {"positions": "alibi", **ODD_HEADS},
    {"positions": "rotary", **ODD_HEADS},
    {"positions": "relative", "max_relative_position": 2, **ODD_HEADS},
    {"positions": "t5", "position_buckets": 4, **ODD_HEADS},
    {"attention_score": "general", **ODD_HEADS},
    {
        "attention_score": "additive",
        "positions": "alibi",
        "activation": "swish",
        "num_decoder_layers": 2,
        "output_bias": True,
        "decoder_start": "padding",
        "attention_bias": True,
    },
    {"layer_norm": "pre", "positions": "relative", "attention_score": "dot_product"},
    {"layer_norm": "pre", "tie_embeddings": "target", "remat": True},
    {
        "tie_embeddings": "none",
        "positions": "learned",
        "attention_window": 2,
        "attention_score": "general",
        **ODD_HEADS,
    },
    {"positions": "learned", "max_positions": 4, "out_of_range_positions": "clamp"},
    {"attention_implementation": "blockwise"},
    {"architecture": "rnn", "attention_score": "none", "rnn_cell": "gru"},
    {"architecture": "rnn", "attention_score": "general", "tie_embeddings": "none"},
    {
        "architecture": "rnn",
        "attention_score": "additive",
        "rnn_input_feeding": True,
        "num_layers": 2,
    },
    {"architecture": "conv", "attention_score": "additive", "num_layers": 2},
    {"architecture": "conv", "conv_kernel_width": 4, "positions": "learned"},
    {
        "layer_norm": "pre",
        "norm": "rms_norm",
        "feed_forward": "swiglu",
        "feed_forward_bias": False,
        "num_heads": 4,
        "num_kv_heads": 2,
        "query_key_norm": True,
        "positions": "rotary",
    },
    {
        "feed_forward": "geglu",
        "num_kv_heads": 1,
        "attention_window": 2,
        "query_key_norm": True,
        "attention_score": "additive",
        **ODD_HEADS,
    },
    {"num_kv_heads": 1, "attention_implementation": "blockwise"},
    {"num_kv_heads": 1, "positions": "relative", **ODD_HEADS},
]

# Together, these variants cover most options. Other unit tests cover the remaining variants.
FAST = [VARIANTS[i] for i in (6, 7, 9, 13, 16, 17)]


def cases(variants: list[dict[str, Any]], fast: Iterable[dict[str, Any]] = FAST) -> list[Any]:
    """Return a test case for each variant, marking those that are not in `fast` as slow."""
    return [
        pytest.param(changes, id=str(changes), marks=[] if changes in fast else [pytest.mark.slow])
        for changes in variants
    ]
