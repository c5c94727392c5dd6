"""A small experiment that several tests run in seconds, and the fields of configs.

For each field, this module gives the type and examples of valid and invalid values.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from transformer_jax.config.architectures import unused_defaults
from transformer_jax.config.validation import PartName, annotations
from transformer_jax.data.splits import SPLITS, Split

FOLDER = Path(__file__).parents[1] / "data"
# Lines from the built-in corpus of number words: the first 200 training pairs, the first 40
# development pairs, and the first 40 test pairs. The built-in corpus always has 500 development
# pairs, and scoring them takes longer than the eight training steps.
FILES = {split: tuple(str(FOLDER / f"{split}.{side}") for side in ("en", "de")) for split in SPLITS}
# Overrides for `SMALL.data` in tests that need more lines.
NUMBER_WORDS = {"corpus": "number_words", **dict.fromkeys(SPLITS)}

SMALL = Config().change(
    model={
        "num_layers": 1,
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "d_k": 8,
        "d_v": 8,
        "max_length": 64,
    },
    # The four batches of an epoch have only two shapes, so a two-epoch run needs few compilations.
    data={
        "corpus": "text",
        **FILES,
        "bleu_tokenizer": "char",
        "vocab_size": 64,
        "max_length": 24,
        "batch_tokens": 512,
    },
    train={
        "steps": 8,
        "warmup_steps": 4,
        "checkpoint_every": 4,
        "keep_checkpoints": 3,
        "log_every": 2,
    },
    # An untrained model rarely ends a sentence, so searches usually run up to this limit.
    decode={"max_extra_length": 8},
)


def read_pairs(split: Split) -> list[tuple[str, str]]:
    """Return the source line and the target line of each pair in a split."""
    source, target = (Path(name).read_text("utf-8").splitlines() for name in FILES[split])
    return list(zip(source, target, strict=True))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the contents of metrics.jsonl without the fields that depend on the clock."""
    clock = {"time", "tokens_per_second", "utilization", "crc32"}
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def with_architecture(architecture: str, **model: Any) -> Config:
    """Return `SMALL` with this architecture and with defaults for the fields that it ignores."""
    unused = unused_defaults(architecture)
    return SMALL.change(model={**unused, "architecture": architecture, **model})


SECTIONS = (ModelConfig, DataConfig, TrainConfig, DecodeConfig)
FIELDS: list[tuple[Any, str]] = [
    (kind, field.name) for kind in SECTIONS for field in dataclasses.fields(kind)
]


def kind_of(section: Any, key: str) -> Any:
    """Return a field's type. For a part, the type is a Literal of this package's names."""
    kind, rules = annotations(section)[key]
    names = [rule.own for rule in rules if isinstance(rule, PartName)]
    literal: Any = typing.Literal
    return literal[names[0]] if names else kind


KINDS = {(kind, key): kind_of(kind, key) for kind, key in FIELDS}

# A small valid value, a large valid value, and some invalid values. All values between the two
# valid values satisfy the field's rule.
Range = tuple[float, float, tuple[float, ...]]
INTEGER: Range = (1, 10**9, (0, -1, 2**31))
REAL: Range = (1e-12, 1e12, (0.0, -1e-9, 1e-39, 1e39, math.inf, math.nan))
WIDTH: Range = (1, 10**6, (0, -1, 10**6 + 1))
FRACTION: Range = (0.0, 0.999, (1.0, -1e-9, math.inf, math.nan))
RANGES: dict[str, Range] = {
    "num_layers": (1, 1000, (0, -1, 1001)),
    "num_decoder_layers": (1, 1000, (0, -1, 1001)),
    "d_model": (2, 499_998, (0, -2, 10**6 + 2)),
    "d_ff": WIDTH,
    "num_heads": WIDTH,
    # Only 1 divides every number of heads.
    "num_kv_heads": (1, 1, (0, -1, 10**6 + 1)),
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
    "bpe_dropout": FRACTION,
    "bpe_dropout_samples": (1, 1000, (0, -1, 1001)),
    "max_ratio": (1.0, 1e12, (0.999, -1.0, math.inf, math.nan)),
    "batch_tokens": INTEGER,
    "max_batch_shapes": (1, 12, (0, 13)),
    "steps": INTEGER,
    "warmup_steps": INTEGER,
    "learning_rate_scale": REAL,
    "peak_learning_rate": REAL,
    "base_width": WIDTH,
    "base_d_k": WIDTH,
    "decay_steps": INTEGER,
    "decay_fraction": FRACTION,
    "weight_decay": (0.0, 1e12, (-1e-9, math.inf, math.nan)),
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "adam_epsilon": REAL,
    "clip_norm": REAL,
    "ema_decay": FRACTION,
    "label_smoothing": FRACTION,
    "z_loss": (0.0, 1e12, (-1e-9, math.inf, math.nan)),
    "gradient_accumulation_steps": (1, 10_000, (0, -1, 10_001)),
    "seed": (0, 2**31 - 1, (-1, 2**31)),
    "checkpoint_every": INTEGER,
    "bleu_every": INTEGER,
    "patience": INTEGER,
    "max_minutes_between_checkpoints": REAL,
    "keep_checkpoints": INTEGER,
    "log_every": INTEGER,
    "profile": (0, 10**9, (-1, 2**31)),
    "beam_size": (1, 1000, (0, 1001)),
    "length_penalty_alpha": (0.0, 5.0, (-1e-9, 5.1, math.inf, math.nan)),
    "max_extra_length": (0, 10_000, (-1, 10_001)),
    "average_checkpoints": INTEGER,
}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union type. Return any other type as a 1-tuple."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


NUMBERS = [pair for pair in FIELDS if {int, float} & set(alternatives(KINDS[pair]))]
