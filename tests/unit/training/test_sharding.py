"""Test that each gradient is summed over devices once, and matches a single device's gradient."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.training.sharding import FSDP, DataParallel, sum_over_devices
from transformer_jax.training.step import TrainState, TrainStep, init_state

VOCAB = 20


def make_step(config: Config) -> tuple[TrainStep, TrainState]:
    """Return a training step and the shapes of its state."""
    model = build_transformer(config.model, VOCAB)
    state = jax.eval_shape(lambda: init_state(model, config.train))
    return TrainStep(model, config.train), state


COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


def communicated_arrays(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yield each collective in a program, with the shape and type of each array that it sends.

    If a collective is in the body of a loop, yield it once per iteration.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(COLLECTIVES):
            yield from ((name, variable.aval) for variable in equation.invars)
        for program in jaxprs_in_params(equation.params):
            yield from list(communicated_arrays(program)) * equation.params.get("length", 1)


def make_sharding(devices: int, sharding: type[DataParallel]) -> DataParallel:
    """Return a sharding for the given number of devices, which need not exist."""
    placed = sharding(jax.devices()[:1])
    mesh = AbstractMesh((devices,), (placed.axis,), axis_types=(AxisType.Auto,))
    placed.mesh = mesh  # pyrefly: ignore[bad-assignment]
    return placed


def trace_on(
    devices: int, config: Config, rows: int, sharding: type[DataParallel] = DataParallel
) -> list[tuple[str, Any]]:
    """Return the arrays that a training step exchanges between the given number of devices."""
    step, state = make_step(config)
    placed = make_sharding(devices, sharding)
    side = jax.ShapeDtypeStruct((rows, 9), jnp.int32)
    jaxpr = jax.make_jaxpr(partial(placed.compute_gradients, step))(state, Batch(side, side))
    return list(communicated_arrays(jaxpr.jaxpr))


def sorted_shapes(leaves: Iterable[Any]) -> list[tuple[int, ...]]:
    return sorted(leaf.shape for leaf in leaves)


def check_gradients(arrays: list[tuple[str, Any]], config: Config, dtype: str) -> None:
    """Check that the devices sum the loss and each parameter's gradient exactly once."""
    added = [x for name, x in arrays if name != "all_gather"]
    params = jax.tree.leaves(make_step(config)[1].params)
    assert sorted_shapes(x for x in added if x.shape) == sorted_shapes(params)
    assert {str(x.dtype) for x in added if x.shape} == {dtype}
    # The scalars are the smoothed loss, the negative log-likelihood, and the token count.
    assert [str(x.dtype) for x in added if not x.shape] == ["float32"] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_add_every_gradient_once(dtype: str) -> None:
    config = SMALL.change(model={"dtype": "bfloat16"}, train={"reduction_dtype": dtype})
    arrays = trace_on(4, config, rows=8)
    assert all(name.startswith("psum") for name, _ in arrays)
    check_gradients(arrays, config, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp_gathers_every_split_parameter_and_adds_every_gradient_once(dtype: str) -> None:
    config = SMALL.change(model={"dtype": "bfloat16"}, train={"reduction_dtype": dtype})
    arrays = trace_on(4, config, rows=8, sharding=FSDP)
    # Each parameter has an axis that is divisible by four, so every parameter is split.
    assert {name for name, x in arrays if x.shape} == {"all_gather", "reduce_scatter"}
    check_gradients(arrays, config, dtype)
    gathered = [x for name, x in arrays if name == "all_gather"]
    params = jax.tree.leaves(make_step(config)[1].params)
    assert sum(x.size for x in gathered) == sum(x.size for x in params) / 4
    # This model rounds its kernels and its embedding table to bfloat16. All other parameters are
    # vectors.
    assert {(x.ndim > 1, str(x.dtype)) for x in gathered} == {
        (True, "bfloat16"),
        (False, "float32"),
    }


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 64), (None, "data")),
        ((64, 8), ("data",)),
        ((4, 6, 16), (None, None, "data")),
        ((8, 63), ("data",)),
        ((7,), ()),
        ((), ()),
    ],
)
def test_fsdp_splits_the_largest_axis_that_the_number_of_devices_divides(
    shape: tuple[int, ...], spec: tuple[str | None, ...]
) -> None:
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert make_sharding(4, FSDP).sharding(leaf).spec == PartitionSpec(*spec)


def test_fsdp_adds_the_gradients_of_parameters_that_it_cannot_split() -> None:
    # Only the vocabulary size, 20, is divisible by five.
    arrays = trace_on(5, SMALL, rows=10, sharding=FSDP)
    check_gradients(arrays, SMALL, "float32")
    names = [name for name, x in arrays if x.shape]
    assert names.count("all_gather") == names.count("reduce_scatter") == 1


def test_one_device_adds_nothing() -> None:
    assert not trace_on(1, SMALL, rows=8)
    assert not trace_on(1, SMALL, rows=8, sharding=FSDP)


@pytest.mark.parametrize("sharding", [DataParallel, FSDP])
def test_communication_depends_neither_on_the_batch_nor_on_micro_batches(
    sharding: type[DataParallel],
) -> None:
    halves = SMALL.change(train={"gradient_accumulation_steps": 2})
    # Each device has three rows, which it cannot split into two equal micro-batches.
    assert trace_on(4, halves, 12, sharding) == trace_on(4, SMALL, 64, sharding)


DROPOUT = {"dropout": 0.5, "attention_dropout": 0.3}


@pytest.mark.parametrize(
    ("model", "num_micro_batches"),
    [
        pytest.param(DROPOUT, 1, id="dropout"),
        pytest.param(
            {**DROPOUT, "remat": True, "attention_implementation": "blockwise"},
            2,
            id="dropout, remat, blocks, and micro-batches",
            marks=pytest.mark.slow,
        ),
        pytest.param({"dropout": 0.0}, 3, id="uneven micro-batches", marks=pytest.mark.slow),
    ],
)
def test_devices_add_up_the_gradients_of_one_device(
    model: dict[str, Any], num_micro_batches: int
) -> None:
    train = {"gradient_accumulation_steps": num_micro_batches}
    config = SMALL.change(model=model, train=train)
    step, _ = make_step(config)
    state = init_state(build_transformer(config.model, VOCAB), config.train)
    tokens = np.random.default_rng(0).integers(4, VOCAB, (2, 8, 9)).astype(np.int32)
    expected = jax.jit(step.compute_gradients)(state, Batch(*tokens))
    # Each of two simulated devices has four rows.
    specs: Params = jax.tree.map(lambda _: PartitionSpec(), state.params)
    sum_shards = partial(sum_over_devices, step, axis="data", specs=specs)
    axes = {"in_axes": (None, 0), "out_axes": None, "axis_name": "data"}
    shards = Batch(*tokens.reshape(2, 2, 4, 9))
    sums = jax.jit(jax.vmap(sum_shards, **axes))(state, shards)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), sums, expected)
