"""Where arrays lie: three ways to put one step on many devices, with one result.

data    every device holds all parameters, and an equal share of each batch's rows
fsdp    the same, but parameters and optimizer state are split over the devices too
pmap    as data, by `jax.pmap`: each device adds up its rows, and the sums are added

Under data and fsdp the step is one program over global arrays; XLA adds the communication, and a
dropout mask is the same on any number of devices. Under pmap each device runs the program, and
draws masks of its own. The state has the same global arrays under all of them, so a checkpoint of
one opens under any other.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batches import Batch, Shard
from transformer_jax.training.step import StepMetrics, TrainState, TrainStep

Tree = TypeVar("Tree")


class DataParallel:
    """Every device holds the whole state, and an equal share of each batch's rows."""

    axis = "data"

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        """Lay out the devices: all there are, of all processes, unless others are given."""
        found = jax.devices() if devices is None else devices
        # So that each process's rows lie side by side.
        self.devices = sorted(found, key=lambda device: (device.process_index, device.id))
        # Explicit axes would have Flax say where the result of each lookup lies.
        mesh = Mesh(np.array(self.devices), (self.axis,), axis_types=(AxisType.Auto,))
        self.mesh = mesh
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(self.axis))
        mine = [i for i, d in enumerate(self.devices) if d.process_index == jax.process_index()]
        self.shard = Shard(mine[0], mine[-1] + 1, len(self.devices))
        """Which of each batch's rows this process has to bring."""

    def sharding(self, leaf: Any) -> NamedSharding:
        """Return where an array of the state lies, by its shape."""
        del leaf
        return self.replicated

    def abstract_state(self, tree: Tree) -> Tree:
        """Describe arrays of these shapes that lie where the step wants them."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(x)), tree
        )

    def lowering_args(self, state: TrainState) -> TrainState:
        """Return what a step is lowered for: one program, wherever the state was made.

        In JAX an array's type includes where it lies, and of a fresh state that is told otherwise
        than of one that a step gave back; compiled programs on disk would be found by one only.
        """
        return self.abstract_state(state)

    def place_state(self, state: TrainState) -> TrainState:
        """Bring the state to where the step wants it: what is not there already."""

        def place(leaf: Any) -> jax.Array:
            sharding = self.sharding(leaf)
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            value = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])

        return jax.tree.map(place, state)

    def to_local_device(self, tree: Tree) -> Tree:
        """Return arrays of the state as wholes on a device of this process; all must call it."""
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, self.replicated).addressable_data(0), tree
        )

    def place_batch(self, batch: Batch) -> Batch:
        """Deal this process's `share` of a batch out to its devices."""
        first, last, total = self.shard

        def place(rows: np.ndarray) -> jax.Array:
            shape = (len(rows) // (last - first) * total, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return Batch(*map(place, batch))

    def compile(self, step: TrainStep, state: TrainState) -> Any:
        """Return the step, to be lowered for such a state; the state it is given is used up."""
        where = jax.tree.map(self.sharding, state)

        # A function, for a program is called as it is, in traces and in messages.
        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            return step(state, batch)

        return jax.jit(
            train_step,
            in_shardings=(where, self.batch_sharding),
            out_shardings=(where, self.replicated),
            donate_argnums=0,
        )


class FSDP(DataParallel):
    """State is split over the devices too: each leaf along its largest axis that divides."""

    def sharding(self, leaf: Any) -> NamedSharding:
        """Return where an array of the state lies: on every device, if no axis divides."""
        dividing = [i for i, size in enumerate(leaf.shape) if size and size % self.mesh.size == 0]
        if not dividing:
            return self.replicated
        largest = max(dividing, key=lambda axis: leaf.shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, self.axis))


class PmapDataParallel(DataParallel):
    """`jax.pmap`: every device computes the sums of its own rows, and all add them up."""

    def place_batch(self, batch: Batch) -> Batch:
        """Deal this process's `share` out; the first axis counts devices then."""
        devices = self.shard.last - self.shard.first
        return super().place_batch(Batch(*(x.reshape(devices, -1, x.shape[1]) for x in batch)))

    def lowering_args(self, state: TrainState) -> TrainState:
        """Return the state itself where there are several processes: `jax.pmap` wants arrays."""
        return super().lowering_args(state) if jax.process_count() == 1 else state

    def compile(self, step: TrainStep, state: TrainState) -> Any:
        """Return the step, to be lowered: compiled it takes and gives global arrays."""
        del state

        def on_each(state: TrainState, rows: Batch) -> tuple[TrainState, StepMetrics]:
            # Sums and counts are added, once: a mean of the devices' means would be another
            # step, and so would gradients that were added twice.
            sums = step.sums(state, rows, jax.lax.axis_index(self.axis))
            return step.update(state, jax.lax.psum(sums, self.axis))

        return jax.pmap(
            on_each,
            axis_name=self.axis,
            in_axes=(None, 0),
            out_axes=None,
            donate_argnums=0,
            devices=self.devices,
        )


SHARDINGS: dict[str, type[DataParallel]] = {
    "data": DataParallel,
    "fsdp": FSDP,
    "pmap": PmapDataParallel,
}


class CompiledStep:
    """The train step on a placement, compiled ahead for each shape when the first batch comes."""

    def __init__(
        self,
        step: TrainStep,
        placement: DataParallel,
        say: Callable[[str], None],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the step.

        Args:
            step: two pure functions.
            placement: where state and batches lie.
            say: told of each compilation.
            paused: a context around it, so that rates are those of training.
        """
        self._placement, self._say, self._paused = placement, say, paused
        self._step = step
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Do a step with this process's rows of a batch; the state is used up."""
        placed = self._placement.place_batch(batch)
        shape = (*batch.source.shape, *batch.target.shape)
        if shape not in self._compiled:
            with self._paused():
                began = time.perf_counter()
                step = self._placement.compile(self._step, state)
                described = self._placement.lowering_args(state)
                self._compiled[shape] = step.lower(described, placed).compile()
                seconds = time.perf_counter() - began
            mine, source, _, target = shape
            first, last, total = self._placement.shard
            rows = mine // (last - first) * total
            self._say(f"compiled for {rows} x ({source} + {target}) pieces in {seconds:.1f} s")
        return self._compiled[shape](state, placed)
