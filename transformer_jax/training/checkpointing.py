"""Save and restore checkpoints during training."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import optax

from transformer_jax.backend import describe_environment
from transformer_jax.config import Config
from transformer_jax.distributed.preemption import CheckpointTimer
from transformer_jax.errors import StorageError
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.model.losses import Loss
from transformer_jax.progress import note
from transformer_jax.registry import describe_foreign
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.checkpoint_metadata import EARLIER_REPORTS, DevScores
from transformer_jax.runs.versions import installed_versions
from transformer_jax.training.components import RunComponents
from transformer_jax.training.meter import Sums
from transformer_jax.training.step import StepMetrics, TrainState, init_state

# The `TrainState` counters that checkpoints store as metadata.
COUNTS = ("skipped", "skipped_in_a_row")
# The gradient norm at the step of a checkpoint that awaits its score. If the score ends training,
# the last report contains this value.
UNSCORED = "unscored_gradient_norm"


class AveragingState(NamedTuple):
    """What a checkpoint stores as "optimizer" if training and evaluation parameters differ."""

    state: optax.OptState
    params: Params
    """The training parameters."""


def checkpoint_arrays(state: TrainState) -> dict[str, object]:
    """Return the arrays to store in a checkpoint, keyed by name."""
    params, optimizer = state.evaluation_params, state.opt_state
    if params is not state.params:
        optimizer = AveragingState(optimizer, state.params)
    return {"params": params, "optimizer": optimizer}


def checkpoint_metadata(
    state: TrainState, pending_metrics: Sums, config: Config
) -> dict[str, object]:
    """Return the JSON metadata that a checkpoint stores alongside its arrays."""
    counts = {name: int(getattr(state, name)) for name in COUNTS}
    environment = current_environment(config)
    return {"environment": environment, "pending_metrics": pending_metrics, **counts}


def current_environment(config: Config) -> dict[str, str]:
    """Return the versions, registered files, devices, and settings that can affect the results."""
    parts = describe_foreign(config.parts()).values()
    files = {part["file"]: part["sha256"] for part in parts if "file" in part}
    return {**installed_versions(), **files, **describe_environment()}


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one description of each value in `before` that has changed."""
    return [
        f"{name} {value or 'none'} -> {now[name] or 'none'}"
        for name, value in before.items()
        if now.get(name, value) != value
    ]


class Checkpointer:
    """A manager that saves and restores a run's state and decides when a recovery save is due.

    All processes must call `restore`, `save`, `record_score`, and `wait` at the same steps.
    """

    def __init__(self, run: RunComponents) -> None:
        """Open the run's checkpoints, and issue a note about each damaged one."""
        train, folder = run.folder.config.train, run.folder
        self._run, self._timer = run, CheckpointTimer(train.max_minutes_between_checkpoints)
        latest = None if run.group.is_primary else run.group.broadcast(None)
        self.manager = CheckpointManager(
            folder.checkpoints,
            folder.identity,
            keep=train.keep_checkpoints,
            metric=train.patience_metric,
        )
        if run.group.is_primary:
            latest = run.group.broadcast(self.manager.latest_valid())
        run.group.barrier()
        self._is_empty = latest is None
        self.last_step = latest or 0
        """The step of the latest checkpoint, or 0 if there is no checkpoint."""
        self.unscored: StepMetrics | None = None
        """If the restored checkpoint awaits its score, the metrics at its step, excluding the loss.
        An interruption can leave such a checkpoint."""

    def restore(self) -> tuple[TrainState, Sums]:
        """Return the latest checkpoint's state (or the initial state) and the pending metrics."""
        config, sharding, step = self._run.folder.config.train, self._run.sharding, self.last_step
        if self._is_empty:
            return sharding.place_state(init_state(self._run.model, config)), []
        shapes = jax.eval_shape(lambda: checkpoint_arrays(init_state(self._run.model, config)))
        arrays = self.manager.restore(step, sharding.abstract_state(shapes))
        metadata = self.manager.metadata(step)
        self._note_changes(step, metadata.get("environment", {}))
        try:
            pending = [[float(x), float(y), float(z)] for x, y, z in metadata["pending_metrics"]]
            counts = {name: _scalar(int(metadata[name])) for name in COUNTS}
            if UNSCORED in metadata:
                zero, norm = _scalar(0.0), _scalar(float(metadata[UNSCORED]))
                self.unscored = StepMetrics(Loss(zero, zero, zero), norm, **counts)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"checkpoint {step} has invalid metadata: {error!r}") from error
        seed, params, opt_state = _scalar(config.seed), arrays["params"], arrays["optimizer"]
        if isinstance(opt_state, AveragingState):
            opt_state, params = opt_state
        state = TrainState(_scalar(step), seed, params, opt_state, **counts)
        return sharding.place_state(state), pending

    def _note_changes(self, step: int, before: Mapping[str, str]) -> None:
        changes = describe_changes(before, current_environment(self._run.folder.config))
        if changes and self._run.group.is_primary:
            note(f"sums may be rounded differently after step {step}: {', '.join(changes)}")

    def needs_recovery_save(self) -> bool:
        """Return whether a recovery checkpoint is due. Only the primary process can return True."""
        if not self._run.group.is_primary:
            return False
        # If a save has failed, return True immediately, so that the caller calls `save`, which
        # raises the error.
        is_idle = not self.manager.is_writing()
        return self.manager.has_failed() or (is_idle and self._timer.is_due())

    def save(
        self,
        step: int,
        state: TrainState,
        pending_metrics: Sums,
        unscored: StepMetrics | None,
        num_earlier_reports: int,
    ) -> None:
        """Start writing a checkpoint.

        If the step is to be evaluated, `unscored` contains its metrics. The caller must then call
        `record_score` before it donates the state, because the state is copied to the host during
        the evaluation. If a signal ends the run before that, the resumed run evaluates the
        checkpoint. Otherwise, the caller can donate the state after this method returns.

        Raises:
            StorageError: this checkpoint or the previous one cannot be written.
        """
        arrays = checkpoint_arrays(state)
        metadata = checkpoint_metadata(state, pending_metrics, self._run.folder.config)
        metadata[EARLIER_REPORTS] = num_earlier_reports
        if unscored is not None:
            metadata[UNSCORED] = float(unscored.gradient_norm)
        self.manager.prepare_save(step, arrays)
        self._run.group.barrier()
        self.manager.save(step, arrays, None, metadata, awaits_score=unscored is not None)
        if self._run.group.count > 1:
            # Copying synchronizes the processes, but only one of them evaluates.
            self.manager.wait_for_copy()
        self._timer.record_save()
        self.last_step = step

    def record_score(self, scores: DevScores | None) -> None:
        """Start adding the scores (None for an unscheduled step) to the latest checkpoint."""
        metadata = self.manager.metadata(self.last_step)
        metadata.pop(UNSCORED, None)
        self.manager.record_score(self.last_step, scores, metadata)
        self.unscored = None

    def wait(self) -> None:
        """Wait until all processes have written their checkpoints to disk."""
        self.manager.wait()
        self._run.group.barrier()

    def __enter__(self) -> "Checkpointer":
        self.manager.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.__exit__(*error)


def _scalar(value: float) -> jax.Array:
    # Unlike `jnp.int32`, this function does not compile a program.
    return jax.device_put(np.int32(value) if isinstance(value, int) else np.float32(value))
