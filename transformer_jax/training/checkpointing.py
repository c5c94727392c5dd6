"""Save training states in checkpoints, on schedule or for recovery, and restore them."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.config import TrainConfig
from transformer_jax.distributed.preemption import CheckpointTimer
from transformer_jax.distributed.processes import ProcessGroup
from transformer_jax.errors import StorageError
from transformer_jax.model.transformer import Transformer
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.runs.versions import installed_versions
from transformer_jax.training.sharding import DataParallel
from transformer_jax.training.step import TrainState, init_state
from transformer_jax.training.throughput import Sums


def checkpoint_arrays(state: TrainState) -> dict[str, Any]:
    """Return the arrays of a state that a checkpoint stores, by name."""
    return {"params": state.params, "optimizer": state.optimizer}


def checkpoint_metadata(state: TrainState, pending_metrics: Sums) -> dict[str, Any]:
    """Return the plain data that a checkpoint stores in addition to the arrays of a state."""
    return {
        "versions": installed_versions(),
        "devices": describe_devices(),
        "pending_metrics": pending_metrics,
        "skipped": int(state.skipped),
        "skipped_in_a_row": int(state.skipped_in_a_row),
    }


def describe_devices() -> str:
    """Return the number and kind of all devices; the kind of a CPU is its model, if known."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        with contextlib.suppress(OSError):
            model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"))
            kind = model[1] if model else kind
    return f"{len(devices)} x {kind}"


def open_checkpoints(
    folder: RunDirectory, group: ProcessGroup, say: Callable[[str], None]
) -> tuple[CheckpointManager, int | None]:
    """Open the checkpoints of a run for training.

    The primary process cleans up the folder and validates the checkpoints before the other
    processes open it.

    Args:
        folder: the run.
        group: the processes that train it.
        say: called with one line for each damaged checkpoint.

    Returns:
        The checkpoints, and the newest valid step, or None if there is no checkpoint.

    Raises:
        StorageError: all checkpoints are damaged, or the folder cannot be used.
    """

    def open_manager() -> CheckpointManager:
        keep = folder.config.train.keep_checkpoints
        return CheckpointManager(folder.checkpoints, folder.identity, keep=keep, say=say)

    latest: int | None = None
    if group.is_primary:
        manager = open_manager()
        latest = group.broadcast(manager.latest_valid())
    else:
        latest = group.broadcast(latest)
        manager = open_manager()
    group.barrier()
    return manager, latest


def restore_state(
    manager: CheckpointManager,
    step: int,
    model: Transformer,
    config: TrainConfig,
    sharding: DataParallel,
) -> tuple[TrainState, Sums]:
    """Return the sharded state after a step, and the metrics that were not yet reported.

    Raises:
        StorageError: the checkpoint is damaged.
    """
    shapes = jax.eval_shape(lambda: init_state(model, config))
    arrays = manager.restore(step, sharding.abstract_state(checkpoint_arrays(shapes)))
    metadata = manager.metadata(step)
    try:
        pending = [[float(x), float(y), float(z)] for x, y, z in metadata["pending_metrics"]]
        counts = {name: jnp.int32(metadata[name]) for name in ("skipped", "skipped_in_a_row")}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"checkpoint {step} has invalid metadata: {error!r}") from error
    state = TrainState(jnp.int32(step), jnp.int32(config.seed), **arrays, **counts)
    return sharding.place_state(state), pending


class Checkpointer:
    """Saves the states of a run, and decides when a recovery checkpoint is due.

    All processes call `save` and `wait` at the same steps.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        group: ProcessGroup,
        *,
        last_step: int,
        max_minutes: float,
    ) -> None:
        """Start the recovery timer.

        Args:
            manager: the checkpoints on disk.
            group: the processes that train the run.
            last_step: the step of the newest checkpoint, 0 if there is none.
            max_minutes: the longest time between two checkpoints.
        """
        self._manager = manager
        self._group = group
        self._timer = CheckpointTimer(max_minutes)
        self.last_step = last_step
        """The step of the newest checkpoint."""

    @property
    def scores(self) -> dict[int, float]:
        """The perplexity of each scheduled checkpoint that is kept, by step."""
        return self._manager.scores

    def is_due(self) -> bool:
        """Return whether this process asks for a checkpoint now; only the primary does."""
        if not self._group.is_primary:
            return False
        # A failed save raises its error when the next save begins, so request a save.
        is_idle = not self._manager.is_writing()
        return self._manager.has_failed() or (is_idle and self._timer.is_due())

    def save(
        self, step: int, state: TrainState, pending_metrics: Sums, perplexity: float | None
    ) -> None:
        """Begin to write a checkpoint; after this call, the state may be donated.

        Args:
            step: the step that returned the state.
            state: the state to save.
            pending_metrics: the metrics that a resumed run reports.
            perplexity: the score of a scheduled checkpoint, else None.

        Raises:
            StorageError: this checkpoint or the previous one cannot be written.
        """
        arrays = checkpoint_arrays(state)
        self._manager.prepare_save(step, arrays)
        self._group.barrier()
        metadata = checkpoint_metadata(state, pending_metrics)
        self._manager.save(step, arrays, perplexity, metadata)
        self._timer.record_save()
        self.last_step = step

    def wait(self) -> None:
        """Wait until the checkpoints of all processes are on disk.

        Raises:
            StorageError: this process could not write its part.
        """
        self._manager.wait()
        self._group.barrier()
