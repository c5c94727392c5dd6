"""The config's fields, their types, and examples of valid and invalid numbers."""

import dataclasses
import math
import types
import typing
from typing import Any

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, TrainConfig

SECTIONS = (ModelConfig, DataConfig, TrainConfig, DecodeConfig)
FIELDS: list[tuple[Any, str]] = [
    (kind, field.name) for kind in SECTIONS for field in dataclasses.fields(kind)
]
KINDS = {(kind, key): typing.get_type_hints(kind)[key] for kind, key in FIELDS}

# A small valid value, a large valid value, and some invalid values. All values between the two
# valid values satisfy the field's rule.
Range = tuple[float, float, tuple[float, ...]]
INTEGER: Range = (1, 10**9, (0, -1))
REAL: Range = (1e-12, 1e12, (0.0, -1e-9, math.inf, math.nan))
WIDTH: Range = (1, 10**6, (0, -1, 10**6 + 1))
FRACTION: Range = (0.0, 0.999, (1.0, -1e-9, math.inf, math.nan))
RANGES: dict[str, Range] = {
    "num_layers": (1, 1000, (0, -1, 1001)),
    "num_decoder_layers": (1, 1000, (0, -1, 1001)),
    "d_model": (2, 499_998, (0, -2, 10**6 + 2)),
    "d_ff": WIDTH,
    "num_heads": WIDTH,
    "d_k": WIDTH,
    "d_v": WIDTH,
    "dropout": FRACTION,
    "attention_dropout": FRACTION,
    "activation_dropout": FRACTION,
    "layer_norm_epsilon": REAL,
    "max_relative_position": WIDTH,
    "position_buckets": (4, 64, (3, 65)),
    "max_positions": WIDTH,
    "attention_window": WIDTH,
    "conv_kernel_width": (1, 1000, (0, -1, 1001)),
    "max_length": (1, 10**6, (0, -1)),
    "num_pairs": (1, 500_000, (0, -1, 500_001)),
    "max_numbers_per_line": (1, 25, (0, -1, 301)),
    "max_digits": (5, 6, (0, 4, 7)),
    "vocab_size": (8, 1_000_000, (7, -8, 1_000_001)),
    "source_vocab_size": (8, 1_000_000, (7, -8, 1_000_001)),
    "max_ratio": (1.0, 1e12, (0.999, -1.0, math.inf, math.nan)),
    "batch_tokens": INTEGER,
    "max_batch_shapes": (1, 12, (0, 13)),
    "steps": INTEGER,
    "warmup_steps": INTEGER,
    "learning_rate_scale": REAL,
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "adam_epsilon": REAL,
    "clip_norm": REAL,
    "label_smoothing": FRACTION,
    "gradient_accumulation_steps": INTEGER,
    "seed": (0, 2**31 - 1, (-1, 2**31)),
    "checkpoint_every": INTEGER,
    "bleu_every": INTEGER,
    "patience": INTEGER,
    "max_minutes_between_checkpoints": REAL,
    "keep_checkpoints": INTEGER,
    "log_every": INTEGER,
    "profile": (0, 10**9, (-1,)),
    "beam_size": (1, 1000, (0, 1001)),
    "length_penalty_alpha": (0.0, 1e12, (-1e-9, math.inf, math.nan)),
    "max_extra_length": (0, 10**9, (-1,)),
    "average_checkpoints": INTEGER,
}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union type. Return any other type as a 1-tuple."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


NUMBERS = [pair for pair in FIELDS if {int, float} & set(alternatives(KINDS[pair]))]
