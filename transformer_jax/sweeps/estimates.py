"""Estimate the time, the disk space, the memory, and the number of devices that a sweep needs.

`python -m transformer_jax.sweeps.estimates SWEEP` prints the bytes of device memory that a run of
each row needs, as JSON.
"""

import json
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp

from transformer_jax import progress
from transformer_jax.baselines.build import build_model
from transformer_jax.compilation.fit import count_devices
from transformer_jax.compilation.programs import check_attention
from transformer_jax.compilation.shapes import (
    assume_shapes,
    count_residuals,
    largest_bucket,
    prepare_shapes,
)
from transformer_jax.compilation.targets import Target
from transformer_jax.compilation.topologies import make_devices
from transformer_jax.config import Config
from transformer_jax.config.loading import import_inherited
from transformer_jax.data.batches import Bucket
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import read_status
from transformer_jax.training.checkpointing import checkpoint_arrays
from transformer_jax.training.flops import peak_flops, plain_config, train_flops
from transformer_jax.training.step import init_state

# The fraction of a device's peak FLOP/s that training is assumed to reach.
ASSUMED_UTILIZATION = 0.3
# The backward pass needs this many times the memory of the values that the forward pass stores.
MEMORY_MARGIN = 1.5


def estimate_seconds(sweep: Sweep, num_parallel: int) -> dict[str, float]:
    """Estimate how many seconds a run of each row takes if `num_parallel` runs train at once.

    The estimates are too high if batches contain padding, or if other programs use the device while
    its peak is measured.
    """
    # Each run uses either one accelerator or an equal share of the CPU.
    share = num_parallel if jax.default_backend() == "cpu" else jax.local_device_count()
    dtypes = {row.config.model.dtype for row in sweep.rows.values()}
    peaks = {dtype: peak_flops(dtype) / share for dtype in dtypes}
    return {
        name: train_flops(row.config) / (ASSUMED_UTILIZATION * peaks[row.config.model.dtype])
        for name, row in sweep.rows.items()
    }


def remaining_runs(sweep: Sweep, *, retry_failed: bool) -> dict[str, float]:
    """Return how many runs in each row remain; a partly trained run counts as a fraction."""
    remaining = dict.fromkeys(sweep.rows, 0.0)
    for run in sweep.runs:
        status = read_status(run)
        is_active = status.status in ("submitted", "running")
        if is_active or status.needs_worker(retry_failed=retry_failed):
            remaining[run.row] += max(0.0, 1 - status.step / run.config.train.steps)
    return remaining


def estimate_bytes(config: Config) -> int:
    """Estimate the total size of a run's checkpoints in bytes."""
    model = build_model(config.model, config.data.vocab_size, config.data.source_vocab_size)
    arrays = jax.eval_shape(lambda: checkpoint_arrays(init_state(model, config.train)))
    checkpoint_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    # The latest and the best checkpoints may be kept in addition to the last `keep_checkpoints`
    # scheduled ones.
    return checkpoint_bytes * (config.train.keep_checkpoints + 2)


def estimate_memory(config: Config, buckets: list[Bucket]) -> int:
    """Estimate the bytes of device memory that training on batches of these shapes needs.

    The estimate counts the state, the gradient, and the values that the forward pass stores for the
    largest batch, with a margin for temporary arrays.
    """
    data, train = config.data, config.train
    model = build_model(plain_config(config.model), data.vocab_size, data.source_vocab_size)
    state = jax.eval_shape(lambda: init_state(model, train))
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(state.params)]
    fixed = sum(x.size * x.dtype.itemsize for x in leaves)
    num_stored = count_residuals(model, largest_bucket(config, buckets))
    stored = num_stored * jnp.dtype(model.config.dtype).itemsize
    return fixed + int(MEMORY_MARGIN * stored / train.gradient_accumulation_steps)


# The number of devices that each row needs, or None if the target has too few devices.
Counts = Mapping[str, int | None]


def count_devices_of_rows(sweep: Sweep, target: Target) -> Counts:
    """Return how many devices each row needs, or None for a row that does not fit."""
    for row in sweep.rows.values():
        check_attention(row.config, target)
    devices = make_devices(target)
    counts: dict[str, int | None] = {}
    for name, row in sweep.rows.items():
        progress.report(f"compiling {name} for {target}")
        bucket = largest_bucket(row.config, assume_shapes(row.config).buckets)
        counts[name] = count_devices(row.config, bucket, target, devices)
    return counts


def describe_counts(counts: Counts, target: Target) -> str:
    """Return a summary, such as "A1 to E: 2 v5e chips each; big: more than 4 v5e chips"."""
    parts: list[str] = []
    for count, group in groupby(counts, key=lambda name: counts[name]):
        first, *others = group
        rows, each = (f"{first} to {others[-1]}", " each") if others else (first, "")
        number = count or target.num_devices
        needed = f"{'' if count else 'more than '}{number} {target.kind} {target.unit}"
        parts.append(f"{rows}: {needed}{'s' if number > 1 else ''}{each}")
    return "; ".join(parts)


def main(path: str) -> None:
    """Print the memory estimates of a stored sweep's rows."""
    import_inherited()
    shapes = {name: prepare_shapes(row.config) for name, row in Sweep.open(Path(path)).rows.items()}
    needed = {name: estimate_memory(x.config, x.buckets) for name, x in shapes.items()}
    print(json.dumps(needed))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
