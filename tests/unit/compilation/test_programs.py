"""Test the statistics of a training step that is compiled for the CPU."""

import jax
import numpy as np
import pytest
from example_configs import SMALL

from transformer_jax.compilation.programs import _required_bytes, compile_step
from transformer_jax.compilation.targets import GIB, parse_target
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.training.flops import batch_flops
from transformer_jax.training.sharding import SHARDINGS

BUCKET = Bucket(8, 16, 16, 1)


@pytest.mark.slow
def test_a_step_that_compiles_is_described_by_its_memory_and_flops() -> None:
    target = parse_target("v5e")
    program = compile_step(SMALL, target, jax.devices()[:1], BUCKET)
    model = build_transformer(SMALL.model, SMALL.data.vocab_size)
    # The parameters and Adam's two moments are stored in float32. The rest of the state consists of
    # six integers, such as the step and the seed.
    assert program.parameter_bytes == 4 * parameter_counts(model)["total"]
    assert program.state_bytes - 3 * program.parameter_bytes in range(16, 33)
    assert program.peak_bytes is not None
    assert program.state_bytes < program.peak_bytes <= program.capacity_bytes == target.capacity
    assert program.fits
    assert program.shape == "8 x (16 + 16)"
    side = np.ones((8, 16), np.int32)
    assert program.model_flops == batch_flops(SMALL.model, 64, Batch(side, side))
    assert program.collectives == ()


@pytest.mark.parametrize("parallelism", SHARDINGS)
def test_an_abstract_batch_has_the_shape_and_sharding_of_a_placed_one(parallelism: str) -> None:
    sharding = SHARDINGS[parallelism](jax.devices()[:1])
    placed = sharding.place_batch(Batch(np.zeros((8, 16), np.int32), np.zeros((8, 12), np.int32)))
    abstract = sharding.abstract_batch(Bucket(8, 16, 12, 1))
    for left, right in zip(placed, abstract, strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim)


def test_the_message_about_too_little_memory_contains_the_size() -> None:
    text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    assert _required_bytes(f"{text}temporaries (17.5G) exceeds available HBM (15.75G).") == (
        17.5 * GIB
    )
    assert _required_bytes("RESOURCE_EXHAUSTED: no number") is None
