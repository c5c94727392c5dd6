"""Estimate the time and disk space of a sweep."""

import jax

from transformer_jax.config import Config
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.training.flops import peak_flops, train_flops

# The fraction of a device's peak FLOP/s that the estimates assume.
ASSUMED_UTILIZATION = 0.3


def estimate_seconds(sweep: Sweep, num_parallel: int) -> dict[str, float]:
    """Return the estimated seconds of one run of each row, if `num_parallel` runs train at once."""
    # Each run has a separate accelerator, but all runs on a CPU share the CPU.
    share = num_parallel if jax.default_backend() == "cpu" else jax.local_device_count()
    dtypes = {row.config.model.dtype for row in sweep.rows.values()}
    peaks = {dtype: peak_flops(dtype) / share for dtype in dtypes}
    return {
        name: train_flops(row.config) / (ASSUMED_UTILIZATION * peaks[row.config.model.dtype])
        for name, row in sweep.rows.items()
    }


def estimate_bytes(config: Config) -> int:
    """Return the estimated size of a run's checkpoints, in bytes."""
    model = build_transformer(config.model, config.data.vocab_size, config.data.source_vocab_size)
    # A checkpoint has the parameters and Adam's two moments, in float32. The latest and the best
    # checkpoint are stored in addition to `keep_checkpoints`.
    checkpoint_bytes = 3 * 4 * parameter_counts(model)["total"]
    return checkpoint_bytes * (config.train.keep_checkpoints + 2)
