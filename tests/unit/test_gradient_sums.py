"""Test that devices sum each gradient once, and that the sums match those of one device."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh
from small import SMALL

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch
from transformer_jax.model.build import build_transformer
from transformer_jax.training.sharding import DataParallel, sum_over_devices
from transformer_jax.training.step import TrainState, TrainStep, init_state, make_train_step

VOCAB = 20


def make_step(config: Config) -> tuple[TrainStep, TrainState]:
    """Return a step and the shapes of its state."""
    model = build_transformer(config.model, VOCAB)
    state = jax.eval_shape(lambda: init_state(model, config.train))
    return make_train_step(model, config.train), state


def added_arrays(jaxpr: Any) -> Iterator[Any]:
    """Yield the shape and type of each array that a program sums across devices."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("psum"):
            yield from (variable.aval for variable in equation.invars)
        for program in jaxprs_in_params(equation.params):
            yield from added_arrays(program)


def trace_on(devices: int, config: Config, rows: int) -> list[Any]:
    """Return the arrays that `data` parallelism sums across this many devices."""
    step, state = make_step(config)
    sharding = DataParallel(jax.devices()[:1])
    sharding.mesh = AbstractMesh((devices,), (sharding.axis,))  # pyrefly: ignore[bad-assignment]
    side = jax.ShapeDtypeStruct((rows, 9), jnp.int32)
    jaxpr = jax.make_jaxpr(partial(sharding.compute_gradients, step))(state, Batch(side, side))
    return list(added_arrays(jaxpr.jaxpr))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_add_every_gradient_once(dtype: str) -> None:
    config = SMALL.change(model={"dtype": "bfloat16"}, train={"reduction_dtype": dtype})
    arrays = trace_on(4, config, rows=8)
    gradients = [x for x in arrays if x.shape]
    params = jax.tree.leaves(make_step(config)[1].params)
    assert sorted(x.shape for x in gradients) == sorted(x.shape for x in params)
    assert {str(x.dtype) for x in gradients} == {dtype}
    # The scalars are the three sums in the loss.
    assert [str(x.dtype) for x in arrays if not x.shape] == ["float32"] * 3


def test_one_device_adds_nothing_and_uneven_micro_batches_are_left_to_xla() -> None:
    assert not trace_on(1, SMALL, rows=8)
    halves = SMALL.change(train={"gradient_accumulation_steps": 2})
    assert not trace_on(4, halves, rows=12)


@pytest.mark.parametrize(
    ("model", "num_micro_batches"),
    [
        pytest.param({}, 1, id="default"),
        pytest.param(
            {"remat": True, "attention_implementation": "blockwise"},
            2,
            id="remat, blocks, and micro-batches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_devices_draw_the_dropout_masks_of_one_device(
    model: dict[str, Any], num_micro_batches: int
) -> None:
    dropout = {"dropout": 0.5, "attention_dropout": 0.3}
    train = {"gradient_accumulation_steps": num_micro_batches}
    config = SMALL.change(model={**dropout, **model}, train=train)
    step, _ = make_step(config)
    state = init_state(build_transformer(config.model, VOCAB), config.train)
    tokens = np.random.default_rng(0).integers(4, VOCAB, (2, 8, 9)).astype(np.int32)
    expected = jax.jit(step.compute_gradients)(state, Batch(*tokens))
    # Each of two simulated devices has four rows.
    sum_shards = partial(sum_over_devices, step, axis="data")
    axes = {"in_axes": (None, 0), "out_axes": None, "axis_name": "data"}
    shards = Batch(*tokens.reshape(2, 2, 4, 9))
    sums = jax.jit(jax.vmap(sum_shards, **axes))(state, shards)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), sums, expected)
