"""Test the batch shapes that `compile` assumes, and those that it takes from prepared text."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from example_configs import SMALL, with_architecture

from transformer_jax.baselines.build import build_model
from transformer_jax.compilation.shapes import (
    LAYER_ACTIVATIONS,
    assume_shapes,
    full_bucket,
    largest_bucket,
    prepare_shapes,
)
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.model.encoder_decoder import Params, init_params, make_rng


def test_assumed_batches_are_full_and_double_in_width_up_to_the_maximum() -> None:
    config = Config().change(data={"max_length": 100, "batch_tokens": 1000})
    shapes = [tuple(bucket)[:3] for bucket in assume_shapes(config).buckets]
    assert shapes == [(56, 16, 16), (24, 32, 32), (8, 64, 64), (8, 100, 100)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256])
def test_the_widest_assumed_batch_has_room_for_every_pair(length: int) -> None:
    config = Config().change(data={"max_length": length})
    widths = [bucket.source for bucket in assume_shapes(config).buckets]
    assert widths[-1] == length
    assert widths == sorted(set(widths))
    assert all(width >= 16 for width in widths[:-1])


def test_the_largest_batch_is_the_one_with_the_most_activations() -> None:
    config = Config()
    assert largest_bucket(config, assume_shapes(config).buckets).source == config.data.max_length
    # A few long sentences need less memory than a full batch of short sentences.
    few, many = Bucket(8, 256, 256, 1), Bucket(776, 32, 32, 1)
    assert largest_bucket(config, [few, many]) == many


@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_only_a_transformer_needs_much_more_memory_for_the_same_tokens_in_longer_sentences(
    architecture: str,
) -> None:
    long, short = Bucket(8, 256, 256, 1), Bucket(72, 32, 32, 1)
    assert largest_bucket(Config(), [long, short]) == long
    config = Config().change(model={"architecture": architecture})
    assert largest_bucket(config, [long, short]) == short


@pytest.mark.parametrize("architecture", ["transformer", "rnn", "conv"])
def test_the_estimate_agrees_with_the_arrays_that_the_backward_pass_reads(
    architecture: str,
) -> None:
    config = with_architecture(architecture)
    model = build_model(config.model, 100)
    params = jax.eval_shape(lambda: init_params(model, make_rng(0)))

    def count_residuals(source: int, target: int) -> int:
        batch = Batch(*(jax.ShapeDtypeStruct((8, n), jnp.int32) for n in (source, target)))

        def backward(params: Params, batch: Batch) -> Any:
            def loss(params: Params) -> Any:
                rngs = {"dropout": make_rng(0)}
                logits: Any = model.apply({"params": params}, *batch, train=True, rngs=rngs)
                return jnp.sum(logits)

            return jax.vjp(loss, params)[1]

        arrays = jax.tree.leaves(jax.eval_shape(backward, params, batch))
        return sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))

    # Both counts of residuals include the parameters, which therefore cancel out in the difference.
    for short, long in (((8, 8), (24, 8)), ((8, 8), (8, 24))):
        residuals = (count_residuals(*long) - count_residuals(*short)) / 8
        layers = [LAYER_ACTIVATIONS[architecture](config.model, *x) for x in (long, short)]
        assert 0.5 < (layers[0] - layers[1]) / residuals < 2


def test_prepared_text_has_the_batches_and_the_vocabulary_of_its_training() -> None:
    shapes = prepare_shapes(SMALL)
    assert shapes.source.startswith("shapes of train.en + train.de")
    assert shapes.config.data.vocab_size <= SMALL.data.vocab_size
    assert len(shapes.buckets) == 2
    one = prepare_shapes(SMALL.change(data={"max_batch_shapes": 1}))
    assert len(one.buckets) == 1
    limit = assume_shapes(SMALL).buckets[-1]
    assert all(bucket.source <= limit.source for bucket in shapes.buckets)
    for bucket in shapes.buckets:
        full = full_bucket(bucket, SMALL.data.batch_tokens)
        assert bucket.rows <= full.rows
        assert full.rows * max(bucket.source, bucket.target) <= SMALL.data.batch_tokens
