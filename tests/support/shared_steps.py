"""Share compiled training steps between the runs in a test process.

A small run spends most of its time tracing and loading the training step. Runs whose configs differ
only in `UNRELATED` fields train with the same step, so in tests, they share its compiled programs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.encoder_decoder import EncoderDecoder
from transformer_jax.training import loop
from transformer_jax.training.sharding import DataParallel, PmapDataParallel
from transformer_jax.training.step import TrainState, TrainStep

# A training step does not depend on these fields, as `test_compilation` verifies.
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
            if not isinstance(step, SharedStep):
                return compile_step(sharding, step, state, batch)
            shapes = tuple(tokens.shape for tokens in batch)
            key = type(sharding), tuple(sharding.devices), step, shapes
            if key not in programs:
                programs[key] = compile_step(sharding, step, state, batch)
            return programs[key]

        return compile_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "TrainStep", make_shared_step)
        for kind in (DataParallel, PmapDataParallel):
            patch.setattr(kind, "compile", share(kind.compile))
        yield
