"""Train several runs in one program, whose arrays have an additional first axis for the runs.

A small model uses only a fraction of a GPU, and each batch shape takes a while to compile. Several
runs can share the GPU and the compiled programs (see `jax.vmap`). Each run has a slot, its index on
the first axis. Apart from rounding, each run gives the same results as a run that is trained alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from transformer_jax.data.batches import Batch
from transformer_jax.training.step import (
    ComputeGradients,
    Numbers,
    StepMetrics,
    TrainState,
    TrainStep,
)

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class JointStep(TrainStep):
    """A training step for runs that differ only in seeds and in the settings in `Numbers`."""

    steps: tuple[TrainStep, ...] = field(compare=False)
    """The step of each run. The program depends only on the model and config of the first step."""
    numbers: Numbers | None = None

    @classmethod
    def combine(cls, *steps: TrainStep) -> "JointStep":
        """Return a step that performs the given steps, one in each slot."""
        return cls(steps[0].model, steps[0].config, steps)

    def make_numbers(self) -> Numbers:
        """Return the numeric settings of all runs, each as float32[slots]."""
        return _stack([step.make_numbers() for step in self.steps])

    def with_numbers(self, numbers: Numbers) -> "JointStep":
        """Return a step with other numeric settings, such as traced arguments of a program."""
        return replace(self, numbers=numbers)

    def __call__(
        self, state: TrainState, batch: Batch, compute: ComputeGradients | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Update each run's state."""
        one = TrainStep(self.model, self.config)
        return jax.vmap(lambda numbers, *x: one.with_numbers(numbers)(x[0], x[1], compute))(
            self.numbers, state, batch
        )


class Slots:
    """The states of the runs that train together. A single run's arrays have no additional axis."""

    def __init__(self, states: Sequence[TrainState]) -> None:
        """Store one state per slot."""
        self.count = len(states)
        self.is_joint = self.count > 1
        self.num_runs = self.count if self.is_joint else None
        """The length of the additional axis, or None if there is no such axis."""
        self.states = _stack(states) if self.is_joint else states[0]
        """The argument to the training step, to be replaced with the step's result."""

    def read(self, slot: int) -> TrainState:
        """Return the state of one run."""
        return _select(self.states, slot) if self.is_joint else self.states

    def write(self, slot: int, state: TrainState) -> None:
        """Replace the state of one run."""
        self.states = _replace(self.states, slot, state) if self.is_joint else state

    def join(self, batches: Sequence[Batch]) -> Batch:
        """Return the training step's batch, given the batch of each slot."""
        return Batch(*map(np.stack, zip(*batches, strict=True))) if self.is_joint else batches[0]

    def split(self, metrics: StepMetrics) -> list[StepMetrics]:
        """Return the metrics of each slot."""
        return _unstack(metrics, self.count) if self.is_joint else [metrics]


@jax.jit
def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@partial(jax.jit, static_argnums=1)
def _unstack(tree: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, slot=slot: leaf[slot], tree) for slot in range(count)]


@jax.jit
def _select(tree: Tree, slot: ArrayLike) -> Tree:
    return jax.tree.map(lambda leaf: leaf[slot], tree)


@partial(jax.jit, donate_argnums=0)
def _replace(tree: Tree, slot: ArrayLike, value: Tree) -> Tree:
    return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), tree, value)
