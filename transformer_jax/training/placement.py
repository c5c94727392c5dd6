"""Where arrays lie: the batch dealt out over the local devices, the parameters on each.

The step is one program over global arrays; XLA adds the communication. A placement is what
this module returns, so that another one is another function here and nothing elsewhere.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batches import Batch
from transformer_jax.training.step import StepMetrics, TrainState, TrainStep


class Placement(NamedTuple):
    """A mesh of devices, and how state and batches lie on it."""

    mesh: Mesh
    state: NamedSharding
    batch: NamedSharding

    def place_state(self, state: TrainState) -> TrainState:
        """Copy the state to where the step wants it."""
        return jax.device_put(state, self.state)

    def place_batch(self, batch: Batch) -> Batch:
        """Deal the rows out; where they do not divide, fill up with empty ones."""
        devices = self.mesh.size

        def place(pieces: np.ndarray) -> jax.Array:
            padded = np.pad(pieces, ((0, -len(pieces) % devices), (0, 0)))
            return jax.device_put(padded, self.batch)

        return Batch(*map(place, batch))

    def compile(self, step: TrainStep) -> Any:
        """Compile the step; the state that it is given is used up."""
        return jax.jit(
            step,
            in_shardings=(self.state, self.batch),
            out_shardings=(self.state, self.state),
            donate_argnums=0,
        )


def data_parallel() -> Placement:
    """Every local device holds all parameters and an equal share of each batch's rows."""
    devices = jax.local_devices()
    # Explicit axes, JAX's default, would have Flax say where the result of each lookup lies.
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    return Placement(
        mesh,
        state=NamedSharding(mesh, PartitionSpec()),
        batch=NamedSharding(mesh, PartitionSpec("data")),
    )


class CompiledStep:
    """The train step on a placement, compiled ahead for each shape when the first batch comes."""

    def __init__(
        self,
        step: TrainStep,
        placement: Placement,
        say: Callable[[str], None],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the step.

        Args:
            step: a pure function.
            placement: where state and batches lie.
            say: told of each compilation.
            paused: a context around it, so that rates are those of training.
        """
        self._placement, self._say, self._paused = placement, say, paused
        self._step = placement.compile(step)
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Do a step; the state is used up."""
        placed = self._placement.place_batch(batch)
        shape = (*batch.source.shape, *batch.target.shape)
        if shape not in self._compiled:
            with self._paused():
                began = time.perf_counter()
                self._compiled[shape] = self._step.lower(state, placed).compile()
                seconds = time.perf_counter() - began
            rows, source, _, target = shape
            self._say(f"compiled for {rows} x ({source} + {target}) pieces in {seconds:.1f} s")
        return self._compiled[shape](state, placed)
