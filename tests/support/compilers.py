"""Compile, or pretend to compile, for devices that this machine does not have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from transformer_jax.compilation.hlo import Collectives
from transformer_jax.compilation.programs import StepProgram
from transformer_jax.compilation.targets import GIB, Target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket
from transformer_jax.model.target_platform import tracing_for


def lower_for(platform: str, function: Callable[..., Any], *arguments: Any) -> str:
    """Return the StableHLO text of a function for "cpu", "cuda", or "tpu"."""
    # Wrap the function, because JAX caches traces by function but the trace depends on the
    # platform.
    traced_function = jax.jit(lambda *arguments: function(*arguments))
    with tracing_for(platform):
        traced = traced_function.trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()


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
    sizes = (peak <= target.capacity, peak, state, state // 3, target.capacity)
    return StepProgram(bucket.rows, *lengths, *sizes, 5e12, 6e12, collectives, 70.2)
