"""Test the batch shapes that `compile` assumes, and those that it takes from prepared text."""

import pytest
from example_configs import SMALL

from transformer_jax.baselines.build import build_model
from transformer_jax.compilation.shapes import (
    assume_shapes,
    count_residuals,
    full_bucket,
    largest_bucket,
    prepare_shapes,
)
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket


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


# A third of the base model, with the same relative sizes.
THIRD = Config().change(model={"num_layers": 2}, data={"vocab_size": 12_000})


def test_the_largest_batch_is_the_one_with_the_most_activations() -> None:
    assert largest_bucket(THIRD, assume_shapes(THIRD).buckets).source == THIRD.data.max_length
    # A few long sentences need less memory than a full batch of short sentences.
    few, many = Bucket(8, 256, 256, 1), Bucket(776, 32, 32, 1)
    assert largest_bucket(THIRD, [few, many]) == many


@pytest.mark.parametrize(("architecture", "is_long"), [("transformer", True), ("rnn", False)])
def test_only_a_transformer_needs_much_more_memory_for_the_same_tokens_in_longer_sentences(
    architecture: str, is_long: bool
) -> None:
    long, short = Bucket(8, 256, 256, 1), Bucket(72, 32, 32, 1)
    config = THIRD.change(model={"architecture": architecture})
    assert largest_bucket(config, [long, short]) == (long if is_long else short)


def test_the_backward_pass_of_each_sub_layer_reads_its_arrays() -> None:
    config = SMALL.change(model={"dropout": 0.0, "num_decoder_layers": 2})
    m, vocabulary = config.model, 100
    model = build_model(m, vocabulary)

    def count(source: int, target: int) -> int:
        return count_residuals(model, Bucket(8, source, target, 1))

    # For each query-key pair and head, the backward pass reads at least the weights. The second
    # difference has no terms for the parameters or for single tokens.
    pairs = (count(24, 8) - 2 * count(16, 8) + count(8, 8)) / (8 * 2 * 8**2 / 2)
    assert m.num_heads <= pairs <= 8 * m.num_heads
    # For each target token, the backward pass reads the logits or their softmax, and several arrays
    # of each layer.
    token = (count(8, 16) - count(8, 8)) / (8 * 8)
    assert vocabulary + 2 * (8 * m.d_model + m.d_ff) < token < 2 * vocabulary + 2 * 50 * m.d_model


@pytest.mark.parametrize("implementation", ["blockwise", "cudnn"])
def test_the_largest_batch_does_not_depend_on_the_implementation(implementation: str) -> None:
    config = SMALL.change(model={"dtype": "bfloat16"})
    buckets = [Bucket(8, 24, 24, 1), Bucket(8, 24, 16, 1)]
    other = config.change(model={"attention_implementation": implementation, "remat": True})
    assert largest_bucket(other, buckets) == largest_bucket(config, buckets) == buckets[0]


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
