"""A fake compiler that uses a formula to compute how much memory a program needs."""

from collections.abc import Sequence

import jax

from transformer_jax.compilation.hlo import Collectives
from transformer_jax.compilation.programs import StepProgram
from transformer_jax.compilation.targets import GIB, Target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket


def compile_by_formula(
    config: Config, target: Target, devices: Sequence[jax.Device], bucket: Bucket
) -> StepProgram:
    """Pretend that the state needs 1 GiB and each token needs 1 MiB, or 0.5 MiB with remat."""
    tokens = bucket.rows * (bucket.source + bucket.target) // len(devices)
    tokens //= config.train.gradient_accumulation_steps * (2 if config.model.remat else 1)
    state = GIB // (len(devices) if config.train.parallelism == "fsdp" else 1)
    peak = state + tokens * (1 << 20)
    lengths = (bucket.source, bucket.target)
    collectives = (Collectives("all-reduce", "bf16", 3, 2 << 30),) if len(devices) > 1 else ()
    sizes = (peak <= target.capacity, peak, state, target.capacity)
    return StepProgram(bucket.rows, *lengths, *sizes, 5e12, 6e12, collectives, 70.2)
