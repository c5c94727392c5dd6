"""Train small models, share their compiled steps, and compare the results bit for bit.

A small run spends most of its time tracing and loading the training step. Runs whose configs differ
only in `UNRELATED` fields train with the same step, so in tests, they share its compiled programs.
"""

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config, TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.distributed import heartbeat
from transformer_jax.model.encoder_decoder import EncoderDecoder
from transformer_jax.runs.array_store import on_device
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training import loop
from transformer_jax.training.checkpointing import checkpoint_arrays
from transformer_jax.training.create_run import create_run
from transformer_jax.training.joint import JointStep
from transformer_jax.training.loop import run_training
from transformer_jax.training.sharding import DataParallel
from transformer_jax.training.step import TrainState, TrainStep, init_state

QUIET = Console(quiet=True)
# Environment variables contain this secret while the tests produce their shared runs.
PRIVATE = "hunter2-and-more"
# JAX traces this jitted function only once for each model and config.
INIT_STATE = jax.jit(init_state, static_argnums=(0, 1))


def train(config: Config, path: Path, **options: Any) -> Path:
    """Create a run, train its model, and return the path to the run."""
    run_training(create_run(config, path, QUIET, **options), QUIET)
    return path


def resume(path: Path, **sections: dict[str, Any]) -> Path:
    """Resume a run with changes to its config, and return its path."""
    folder = RunFolder.open(path)
    run_training(folder.with_config(folder.config.change(**sections)), QUIET)
    return path


def state_of(path: Path) -> tuple[int, Any]:
    """Return the step of the latest checkpoint, along with its parameters and optimizer state."""
    folder = RunFolder.open(path)
    model = build_model(folder.config.model, **folder.vocabulary.sizes)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: checkpoint_arrays(INIT_STATE(model, folder.config.train)))
    arrays = on_device(shapes, device)
    with CheckpointManager(folder.checkpoints, folder.identity) as checkpoints:
        step = checkpoints.latest_valid()
        assert step is not None
        return step, checkpoints.restore(step, arrays)


def scores_of(path: Path) -> dict[int, float]:
    """Return the perplexity of each scheduled checkpoint."""
    with CheckpointManager(path / "checkpoints", RunFolder.open(path).identity) as checkpoints:
        return checkpoints.perplexities


def assert_same(left: Any, right: Any) -> None:
    """Check that two trees of arrays are bit-identical."""
    jax.tree.map(np.testing.assert_array_equal, left, right)


def signal_at_step(patch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Arrange for this process to receive a signal during the given training step."""
    beat = heartbeat.beat

    def beat_and_signal(current: int) -> None:
        beat(current)
        if current == step:
            signal.raise_signal(number)

    patch.setattr(heartbeat, "beat", beat_and_signal)


# A training step does not depend on these fields, as `test_compiled_step` verifies.
UNRELATED: dict[str, Any] = {
    "steps": 8,
    "seed": 0,
    "log_every": 2,
    "checkpoint_every": 4,
    "checkpoint_unit": "step",
    "bleu_every": 1,
    "patience": None,
    "keep_checkpoints": 1,
    "max_minutes_between_checkpoints": 10.0,
    "profile": 0,
}
Compile = Callable[[Any, TrainStep, TrainState, Batch], jax.stages.Compiled]


class SharedStep(TrainStep):
    """A step whose programs several runs share. A plain `TrainStep` is compiled for each run."""


class SharedJointStep(JointStep):
    """A step for several runs, whose programs are shared."""


@contextmanager
def share_compiled_steps() -> Iterator[None]:
    """Let the runs in this process reuse each other's compiled steps until the context exits."""
    programs: dict[object, jax.stages.Compiled] = {}

    def make_shared_step(model: EncoderDecoder, config: TrainConfig) -> TrainStep:
        return SharedStep(model, dataclasses.replace(config, **UNRELATED))

    def share(compile_step: Compile) -> Compile:
        def compile_once(
            sharding: DataParallel, step: TrainStep, state: TrainState, batch: Batch
        ) -> jax.stages.Compiled:
            if not isinstance(step, SharedStep | SharedJointStep):
                return compile_step(sharding, step, state, batch)
            shapes = tuple(tokens.shape for tokens in batch)
            key = type(sharding), tuple(sharding.devices), step, shapes
            if key not in programs:
                programs[key] = compile_step(sharding, step, state, batch)
            return programs[key]

        return compile_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "TrainStep", make_shared_step)
        patch.setattr(loop, "JointStep", SharedJointStep)
        patch.setattr(DataParallel, "compile", share(DataParallel.compile))
        yield
