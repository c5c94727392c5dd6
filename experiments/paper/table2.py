"""Table 2: the training cost in FLOPs, computed by the paper's method and by counting.

At small scale, `train_small` trains two sizes of the model and averages their last checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.tiny import CONFIG as TINY
from transformer_jax.api import report, sweep
from transformer_jax.config import Config
from transformer_jax.config.loading import load_config, run_name
from transformer_jax.inference.trained_run import load
from transformer_jax.sweeps.estimates import ASSUMED_UTILIZATION, estimate_bytes
from transformer_jax.training.flops import peak_flops, train_flops

# Sustained single-precision FLOP/s of a P100, according to the paper (section 6.1).
P100_FLOPS = 9.5e12
NUM_GPUS = 8


@dataclass(frozen=True)
class Training:
    """A row of Table 2."""

    model: str
    languages: str
    config: str
    """The name of the config, which ships with this package."""
    bleu: float
    """The paper's BLEU score on newstest2014."""
    hours: float
    """The paper's training time on 8 P100 GPUs."""
    text_bytes: float
    """The approximate size of the text, in bytes. The compressed download can be smaller."""

    @property
    def paper_flops(self) -> float:
        """The FLOPs by the paper's method: time x number of GPUs x sustained FLOP/s per GPU."""
        return self.hours * 3600 * NUM_GPUS * P100_FLOPS

    @property
    def counted_flops(self) -> float:
        """FLOPs of the matrix products in all training steps, for full batches."""
        return train_flops(load_config(self.config))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that prepare the text, train the model, and score it."""
        return (
            f"transformer-jax prepare {self.config}",
            f"transformer-jax train {self.config}",
            f"transformer-jax evaluate runs/{run_name(self.config)}",
        )


GERMAN, FRENCH = 1.7e9, 15e9
TABLE2 = (
    Training("base", "English-German", "wmt14", 27.3, 12, GERMAN),
    Training("big", "English-German", "wmt14_big", 28.4, 3.5 * 24, GERMAN),
    Training("base", "English-French", "wmt14_fr:base", 38.1, 12, FRENCH),
    Training("big", "English-French", "wmt14_fr:big", 41.8, 3.5 * 24, FRENCH),
)


def estimate_seconds(training: Training) -> float:
    """Estimate the training time in seconds on all local devices."""
    config = load_config(training.config)
    return training.counted_flops / (ASSUMED_UTILIZATION * peak_flops(config.model.dtype))


def estimate_disk(training: Training) -> float:
    """Estimate the size of the text and the checkpoints in bytes."""
    return training.text_bytes + estimate_bytes(load_config(training.config))


def make_small_rows(steps: int) -> dict[str, Config]:
    """Return two models on number words that differ like base and big, but by smaller factors.

    The larger model has twice the width and twice the heads, trains for twice as many steps, and
    averages more checkpoints. `steps` is the number of training steps of the smaller model.
    """
    every = max(1, steps // 10)
    base = TINY.change(
        model={"d_model": 64, "d_ff": 256, "d_k": 16, "d_v": 16},
        train={
            "steps": steps,
            "warmup_steps": max(1, steps // 4),
            "checkpoint_every": every,
            "bleu_every": 20,
            "log_every": every,
        },
        decode={"average_checkpoints": 3 if steps > 3 else 1},
    )
    big = base.change(
        model={"d_model": 128, "d_ff": 512, "num_heads": 8},
        train={"steps": 2 * steps},
        decode={"average_checkpoints": 5 if steps > 3 else 1},
    )
    return {"base": base, "big": big}


def train_small(rows: Mapping[str, Config], path: Path, seeds: int) -> list[list[str]]:
    """Train the rows as a sweep in `path`, and return a table like Table 2.

    The table compares the test BLEU of the last checkpoint with that of the averaged checkpoints,
    both as means over seeds. A repeated call resumes the sweep.
    """
    planned = sweep(rows, path, seeds=seeds)
    results = report(path).results
    head = ["model", "parameters", "steps", "BLEU, last checkpoint", "BLEU, averaged", "averaged"]
    table = [[*head, "FLOPs (paper)", "FLOPs (counted)"]]
    for name, row in results.rows.items():
        runs = [run for run in planned.runs if run.row == name]
        last = [load(run.path, average_checkpoints=1).evaluate("test").scores.bleu for run in runs]
        averaged = [float(status.scores["test"]["bleu"]) for status in row.statuses]
        counted, by_time = row.flops or (0.0, 0.0)
        table.append(
            [
                name,
                f"{row.parameters:,}",
                f"{row.config.train.steps:,}",
                f"{sum(last) / len(last):.1f}",
                f"{sum(averaged) / len(averaged):.1f}",
                f"{row.config.decode.average_checkpoints}",
                f"{by_time:.2g}",
                f"{counted:.2g}",
            ]
        )
    return table
