"""Helpers for tests that write and read small checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager

IDENTITY = {"model.d_model": 2, "data": "f1a9"}
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def params_of(step: int) -> dict[str, Any]:
    """Return a small parameter tree whose values depend on the step."""
    return {"layer": {"kernel": jnp.full((3, 2), float(step)), "bias": jnp.arange(2.0) + step}}


def with_optimizer(params: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint: the given parameters and an optimizer state."""
    return {"params": params, "optimizer": {"count": jnp.int32(7)}}


def target_like(params: Any) -> dict[str, Any]:
    """Return the parameters' shapes and dtypes, as `CheckpointManager.restore` expects them."""
    return {"params": on_device(params, SHARDING)}


def write_steps(folder: Path, perplexities: dict[int, float | None], keep: int = 3) -> None:
    """Write a checkpoint for each step.

    A checkpoint that has a recorded perplexity counts as scheduled.
    """
    with CheckpointManager(folder, IDENTITY, keep=keep) as checkpoints:
        for step, perplexity in perplexities.items():
            checkpoints.prepare_save(step, with_optimizer(params_of(step)))
            checkpoints.save(step, with_optimizer(params_of(step)), perplexity, {})


def steps_on_disk(folder: Path) -> set[int]:
    """Return the steps of all checkpoints in a directory; fail if it contains anything else."""
    return {int(path.name) for path in folder.iterdir()}


def open_writable(folder: Path) -> CheckpointManager:
    """Open a checkpoint folder for writing."""
    return CheckpointManager(folder, IDENTITY, keep=3)


def first_value(checkpoints: CheckpointManager, step: int) -> float:
    """Restore a checkpoint from `write_steps` and return its first value, which equals its step."""
    restored = checkpoints.restore(step, target_like(params_of(0)))
    return float(restored["params"]["layer"]["kernel"][0, 0])
