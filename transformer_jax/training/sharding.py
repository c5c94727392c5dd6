"""Three ways to distribute arrays and run one training step on many devices.

    data    every device holds all parameters and an equal share of each batch's rows
    fsdp    like data, but parameters and optimizer state are also split over the devices
    pmap    like data, but compiled with `jax.pmap`

Each device sums gradients over its rows, and then the devices add their sums. With `fsdp`, each
device first gathers the parameters, and then keeps only its shard of the sums. The dropout masks
are the same on any number of devices if each device's rows divide evenly into micro-batches. All
three strategies represent the state as the same global arrays, so a run can resume with any
strategy.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batches import Batch, Bucket, Shard
from transformer_jax.model.dropout import drawing_for_shard
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.model.target_platform import tracing_for
from transformer_jax.training.step import GradientSum, Numbers, StepMetrics, TrainState, TrainStep

Tree = TypeVar("Tree")

ROUNDED_PARAMS = {"kernel", "table"}
"""Names of parameters that every module rounds to `model.dtype` before using them."""


class DataParallel:
    """Data parallelism: every device stores the whole state and an equal share of each batch."""

    axis = "data"

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        """Build a one-dimensional mesh. `devices` defaults to all devices of all processes."""
        devices = jax.devices() if devices is None else devices
        # Sort the devices by process, so that each process gets consecutive rows in a batch.
        self.devices = sorted(devices, key=lambda device: (device.process_index, device.id))
        self.platform = self.devices[0].platform
        # Explicit axes would require Flax to specify the sharding of each embedding lookup.
        self.mesh = Mesh(np.array(self.devices), (self.axis,), axis_types=(AxisType.Auto,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.batch_sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        process = jax.process_index()
        local = [i for i, d in enumerate(self.devices) if d.process_index == process]
        self.shard = Shard(local[0], local[-1] + 1, len(self.devices))
        """The shards of each batch that this process holds."""

    def sharding(self, _leaf: jax.Array | jax.ShapeDtypeStruct, /) -> NamedSharding:
        """Return the sharding of an array in the state, based only on the array's shape."""
        return self.replicated

    def partition_specs(self, tree: Tree) -> Tree:
        """Return the tree with each array replaced by its `PartitionSpec`."""
        return jax.tree.map(lambda leaf: self.sharding(leaf).spec, tree)

    def abstract_state(self, tree: Tree) -> Tree:
        """Return the shapes, types, and shardings that a step expects, without any values."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(x)), tree
        )

    def place_state(self, tree: Tree) -> Tree:
        """Place each array in a state, or in `Numbers`, with the sharding that a step expects."""

        def place(leaf: jax.Array) -> jax.Array:
            sharding = self.sharding(leaf)
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            value = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])

        return jax.tree.map(place, tree)

    def to_local_device(self, tree: Tree) -> Tree:
        """Gather the state's arrays on one local device. Every process must call this method."""
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, self.replicated).addressable_data(0), tree
        )

    def place_batch(self, batch: Batch) -> Batch:
        """Return the global batch, given the rows in this process's `shard`."""

        def place(rows: np.ndarray) -> jax.Array:
            num_rows = len(rows) // (self.shard.last - self.shard.first) * self.shard.total
            shape = (num_rows, *rows.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, rows, shape)

        return Batch(*map(place, batch))

    def abstract_batch(self, bucket: Bucket) -> Batch:
        """Return the shapes and shardings of `place_batch`'s output for a batch in this bucket."""
        rows, sharding = -(-bucket.rows // self.shard.total) * self.shard.total, self.batch_sharding
        shapes = (rows, bucket.source), (rows, bucket.target)
        return Batch(*(jax.ShapeDtypeStruct(x, jnp.int32, sharding=sharding) for x in shapes))

    def compute_gradients(self, step: TrainStep, state: TrainState, batch: Batch) -> GradientSum:
        """Compute the gradient and loss sums over the global batch, while `jit` traces a step.

        Without `shard_map`, XLA would all-reduce the embedding's gradient twice: once for the
        lookups and once for the logits. XLA would also all-reduce most gradients of a bfloat16
        model in bfloat16. With `fsdp`, XLA would split matrix products along the sharded axes of
        the parameters, and devices would exchange activations, which grow with the batch.
        """
        if self.mesh.size == 1:
            return step.compute_gradients(state, batch)
        specs = self.partition_specs(state)
        return jax.shard_map(
            partial(sum_over_devices, step, axis=self.axis, specs=specs.params),
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(self.axis)),
            out_specs=(specs.params, PartitionSpec()),
            # If `check_vma` were true, JAX would insert a `psum` of the gradient at each use of a
            # parameter.
            check_vma=False,
        )(state, batch)

    def compile(self, step: TrainStep, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Compile (state, numbers, batch) -> (new state, metrics). The old state is donated."""

        # JAX uses this function's name in traces and error messages.
        def train_step(
            state: TrainState, numbers: Numbers, batch: Batch
        ) -> tuple[TrainState, StepMetrics]:
            return step.with_numbers(numbers)(state, batch, self.compute_gradients)

        with tracing_for(self.platform):
            return self._lower(train_step, state, step, batch).compile()

    def _lower(
        self, function: Callable[..., object], state: TrainState, step: TrainStep, batch: Batch
    ) -> jax.stages.Lowered:
        shardings = jax.tree.map(self.sharding, state)
        jitted = jax.jit(
            function,
            in_shardings=(shardings, self.replicated, self.batch_sharding),
            out_shardings=(shardings, self.replicated),
            donate_argnums=0,
        )
        # JAX keys its program cache on the input shardings. The shardings of a new state and of a
        # state returned by a step are equivalent but not equal. With abstract arrays, both states
        # use the same cache entry.
        arguments = self.abstract_state((state, jax.eval_shape(step.make_numbers)))
        return jitted.lower(*arguments, batch)


class FSDP(DataParallel):
    """Data parallelism that also splits the state's arrays over the devices."""

    def sharding(self, leaf: jax.Array | jax.ShapeDtypeStruct, /) -> NamedSharding:
        """Return a sharding along the largest axis that the number of devices divides, if any."""
        divisible = [i for i, size in enumerate(leaf.shape) if size and size % self.mesh.size == 0]
        if not divisible:
            return self.replicated
        largest = max(divisible, key=lambda axis: leaf.shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, self.axis))


class PmapDataParallel(DataParallel):
    """Data parallelism, compiled with `jax.pmap`."""

    def place_batch(self, batch: Batch) -> Batch:
        """Return the global batch with shape [devices, rows per device, length]."""
        devices = self.shard.last - self.shard.first
        return super().place_batch(Batch(*(x.reshape(devices, -1, x.shape[1]) for x in batch)))

    def abstract_batch(self, bucket: Bucket) -> Batch:
        """Return the shapes and shardings of `place_batch`'s output for a batch in this bucket."""
        batch, devices = super().abstract_batch(bucket), self.shard.total
        return Batch(*(x.update(shape=(devices, x.shape[0] // devices, x.shape[1])) for x in batch))

    def compute_gradients(self, step: TrainStep, state: TrainState, batch: Batch) -> GradientSum:
        """Compute the sums over the global batch, while `pmap` traces a step on one device's rows.

        The devices add sums and counts, because a mean of means would weight tokens unequally.
        """
        specs = self.partition_specs(state.params)
        return sum_over_devices(step, state, batch, axis=self.axis, specs=specs)

    def _lower(
        self, function: Callable[..., object], state: TrainState, step: TrainStep, batch: Batch
    ) -> jax.stages.Lowered:
        axes = {"axis_name": self.axis, "in_axes": (None, None, 0), "out_axes": None}
        mapped = jax.pmap(function, **axes, donate_argnums=0, devices=self.devices)
        # If there are multiple processes, `jax.pmap` can be lowered only with concrete arrays.
        if jax.process_count() == 1:
            arguments = self.abstract_state((state, jax.eval_shape(step.make_numbers)))
        else:
            arguments = state, self.place_state(step.make_numbers())
        return mapped.lower(*arguments, batch)


def sum_over_devices(
    step: TrainStep, state: TrainState, rows: Batch, *, axis: str, specs: Params
) -> GradientSum:
    """Sum gradients and losses over one device's rows, and then across the devices on `axis`.

    `specs` contains the `PartitionSpec` of each parameter. If a parameter is split over the
    devices, gather it first, and return only this device's shard of its gradient. Send
    `ROUNDED_PARAMS` in the model's dtype: bfloat16 halves the communication without changing any
    result.
    """

    def gather(
        path: tuple[jax.tree_util.DictKey, ...], shard: jax.Array, spec: PartitionSpec
    ) -> jax.Array:
        if axis not in spec:
            return shard
        is_rounded = jax.tree_util.keystr(path[-1:], simple=True) in ROUNDED_PARAMS
        sent = shard.astype(step.model.config.dtype) if is_rounded else shard
        full = jax.lax.all_gather(sent, axis, axis=spec.index(axis), tiled=True)
        return full.astype(shard.dtype)

    def add(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        is_rounded = step.config.reduction_dtype == "bfloat16"
        sent = gradient.astype(jnp.bfloat16) if is_rounded else gradient
        if axis in spec:
            dimension = spec.index(axis)
            total = jax.lax.psum_scatter(sent, axis, scatter_dimension=dimension, tiled=True)
        else:
            total = jax.lax.psum(sent, axis)
        return total.astype(gradient.dtype)

    gathered = state._replace(params=jax.tree.map_with_path(gather, state.params, specs))
    with drawing_for_shard(jax.lax.axis_index(axis)):
        gradients, loss = step.compute_gradients(gathered, rows)
    return jax.tree.map(add, gradients, specs), jax.lax.psum(loss, axis)


SHARDINGS = {"data": DataParallel, "fsdp": FSDP, "pmap": PmapDataParallel}
