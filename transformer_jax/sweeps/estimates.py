"""Estimate the time and disk space that a sweep needs."""

import jax

from transformer_jax.baselines.build import count_parameters
from transformer_jax.config import Config
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import read_status
from transformer_jax.training.flops import peak_flops, train_flops

# The fraction of a device's peak FLOP/s that training is assumed to reach.
ASSUMED_UTILIZATION = 0.3


def estimate_seconds(sweep: Sweep, num_parallel: int) -> dict[str, float]:
    """Estimate how many seconds a run of each row takes if `num_parallel` runs train concurrently.

    The estimates are too high if batches contain a lot of padding or if the source and target
    differ in length, because `train_flops` counts full batches. The estimates are also too high if
    the peak FLOP/s is measured while other programs are using the device.
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
    """Return how many runs of each row remain, counting a partly trained run as a fraction.

    Failed runs count only if `retry_failed` is true.
    """
    remaining = dict.fromkeys(sweep.rows, 0.0)
    for run in sweep.runs:
        status = read_status(run)
        is_active = status.status in ("submitted", "running")
        if is_active or status.needs_worker(retry_failed=retry_failed):
            remaining[run.row] += max(0.0, 1 - status.step / run.config.train.steps)
    return remaining


def estimate_bytes(config: Config) -> int:
    """Estimate the total size of a run's checkpoints in bytes."""
    # A checkpoint contains the parameters and Adam's two moments in float32. The latest and the
    # best checkpoints may be kept in addition to the last `keep_checkpoints` scheduled ones.
    checkpoint_bytes = 3 * 4 * count_parameters(config)["total"]
    return checkpoint_bytes * (config.train.keep_checkpoints + 2)
