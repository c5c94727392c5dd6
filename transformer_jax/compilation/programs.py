"""Compile a training step for devices that this machine does not have, and inspect the program."""

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from transformer_jax.baselines.build import build_model
from transformer_jax.compilation.hlo import Collectives, read_collectives
from transformer_jax.compilation.targets import Target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket
from transformer_jax.errors import Setting, UsageError, is_out_of_memory
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.optional import install_command
from transformer_jax.training.flops import flops_of_lengths
from transformer_jax.training.sharding import SHARDINGS, DataParallel
from transformer_jax.training.step import TrainState, TrainStep, init_state

FULL_ATTENTION = Setting("model.attention_implementation", "full")
# The text of JAX's error message if cuDNN is missing.
NO_CUDNN = "cuDNN is not detected"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# libtpu's message for a program that does not fit ends like this: "(17.02G) exceeds available HBM".
REQUIRED = re.compile(r"\(([\d.]+)([KMGT]?)B?\) exceeds")


@dataclass(frozen=True)
class StepProgram:
    """A compiled training step. All values except the batch shape are per device."""

    rows: int
    """The number of rows in the global batch, a multiple of the number of devices."""
    source_length: int
    target_length: int
    fits: bool
    """Whether the program compiles and is not known to need more than `capacity_bytes`."""
    peak_bytes: int | None
    """Peak memory: the state, the batch, and all temporary arrays. None if it is unknown."""
    state_bytes: int
    """The part of `peak_bytes` for parameters, the optimizer's state, and the step counts."""
    parameter_bytes: int
    """The part of `state_bytes` used by the parameters."""
    capacity_bytes: int
    model_flops: float
    """The FLOPs of a step without padding, counted as in a run's metrics."""
    program_flops: float | None
    """The FLOPs that the compiler reports, if any, with each loop body counted once."""
    collectives: tuple[Collectives, ...]
    seconds: float
    """The time that this machine took to trace and compile the step."""

    @property
    def shape(self) -> str:
        """The shape of the batch: the number of rows, and the source and target lengths."""
        return f"{self.rows} x ({self.source_length} + {self.target_length})"


def check_attention(config: Config, target: Target) -> None:
    """Raise a UsageError if the config's attention needs NVIDIA GPUs but the target has none."""
    if config.model.attention_implementation == "cudnn" and target.is_tpu:
        message = f"model.attention_implementation cudnn needs NVIDIA GPUs, not {target}: use "
        raise UsageError(message, FULL_ATTENTION)


@contextlib.contextmanager
def _cudnn_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if NO_CUDNN not in str(error):
            raise
        advice = install_command("JAX's CUDA plugin")
        raise UsageError(f"JAX cannot find cuDNN: {advice}, or use ", FULL_ATTENTION) from error


def compile_step(
    config: Config, target: Target, devices: Sequence[jax.Device], bucket: Bucket
) -> StepProgram:
    """Compile the step for one batch shape with the config's `train.parallelism`."""
    data = config.data
    model = build_model(config.model, data.vocab_size, data.source_vocab_size)
    sharding = SHARDINGS[config.train.parallelism](devices)
    with _cudnn_errors():
        state = jax.eval_shape(lambda: init_state(model, config.train))
    batch = sharding.abstract_batch(bucket)
    count = len(devices)
    rows = -(-bucket.rows // count) * count
    lengths = (np.full(rows, bucket.source), np.full(rows, bucket.target))
    start = time.perf_counter()
    compiled, peak_bytes = None, None
    try:
        with _cudnn_errors():
            compiled = sharding.compile(TrainStep(model, config.train), state, batch)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        peak_bytes = _required_bytes(str(error))
    seconds = time.perf_counter() - start
    if compiled is not None and (memory := compiled.memory_analysis()) is not None:
        peak_bytes = memory.peak_memory_in_bytes
    return StepProgram(
        rows=rows,
        source_length=bucket.source,
        target_length=bucket.target,
        fits=compiled is not None and (peak_bytes or 0) <= target.capacity,
        peak_bytes=peak_bytes,
        state_bytes=count_bytes(sharding, state),
        parameter_bytes=count_bytes(sharding, state.params),
        capacity_bytes=target.capacity,
        model_flops=flops_of_lengths(config.model, data.vocab_size, *lengths) / count,
        program_flops=(compiled.cost_analysis() or {}).get("flops") if compiled else None,
        collectives=() if compiled is None else tuple(read_collectives(compiled.as_text() or "")),
        seconds=seconds,
    )


def count_bytes(sharding: DataParallel, state: TrainState | Params) -> int:
    """Return the size in bytes of a state on each device, excluding padding."""
    return sum(
        math.prod(sharding.sharding(leaf).shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )


def _required_bytes(message: str) -> int | None:
    """Return the memory requirement, in bytes, from a compiler's error message, or None."""
    match = REQUIRED.search(message)
    return int(float(match[1]) * UNITS[match[2]]) if match else None
