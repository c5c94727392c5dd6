"""A small experiment that several tests run. The experiment takes only seconds."""

import json
from pathlib import Path
from typing import Any

from transformer_jax.config import Config
from transformer_jax.config.architectures import unused_defaults
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
    clock = {"time", "tokens_per_second", "utilization"}
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def with_architecture(architecture: str, **model: Any) -> Config:
    """Return `SMALL` with this architecture and with defaults for the fields that it ignores."""
    unused = unused_defaults(architecture)
    return SMALL.change(model={**unused, "architecture": architecture, **model})
