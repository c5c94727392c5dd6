"""A small experiment that several tests run. It takes only seconds."""

import json
from pathlib import Path
from typing import Any

from transformer_jax.config import Config

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
    # An epoch has four batches of two shapes, so a run covers two epochs with few compilations.
    data={"num_pairs": 200, "vocab_size": 64, "max_length": 24, "batch_tokens": 512},
    train={
        "steps": 8,
        "warmup_steps": 4,
        "checkpoint_every": 4,
        "keep_checkpoints": 3,
        "log_every": 2,
    },
    # An untrained model rarely ends a sentence, so a search runs up to this limit.
    decode={"max_extra_length": 8},
)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the contents of metrics.jsonl without the fields that depend on the clock."""
    clock = {"time", "tokens_per_second", "utilization"}
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
