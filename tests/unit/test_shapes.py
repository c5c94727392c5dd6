"""Test the batch shapes that `compile` uses without reading any text."""

import pytest
from small import SMALL

from transformer_jax.compilation.shapes import (
    assume_shapes,
    assumed_buckets,
    full_bucket,
    largest_bucket,
    prepare_shapes,
)
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket


def test_assumed_batches_are_full_and_double_in_width_up_to_the_maximum() -> None:
    data = Config().change(data={"max_length": 100, "batch_tokens": 1000}).data
    shapes = [tuple(bucket)[:3] for bucket in assumed_buckets(data)]
    assert shapes == [(56, 16, 16), (24, 32, 32), (8, 64, 64), (8, 100, 100)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256])
def test_the_widest_assumed_batch_has_room_for_every_pair(length: int) -> None:
    data = Config().change(data={"max_length": length}).data
    widths = [bucket.source for bucket in assumed_buckets(data)]
    assert widths[-1] == length
    assert widths == sorted(set(widths))
    assert all(width >= 16 for width in widths[:-1])


def test_the_largest_batch_is_the_one_with_the_most_activations() -> None:
    config = Config()
    assert largest_bucket(config, assumed_buckets(config.data)).source == config.data.max_length
    # A few long sentences need less memory than a full batch of short sentences.
    few, many = Bucket(8, 256, 256, 1), Bucket(776, 32, 32, 1)
    assert largest_bucket(config, [few, many]) == many


def test_prepared_text_has_the_batches_and_the_vocabulary_of_its_training() -> None:
    shapes = prepare_shapes(SMALL)
    assert shapes.source.startswith("shapes of train.en + train.de")
    assert shapes.config.data.vocab_size <= SMALL.data.vocab_size
    limit = assume_shapes(SMALL).buckets[-1]
    assert all(bucket.source <= limit.source for bucket in shapes.buckets)
    for bucket in shapes.buckets:
        full = full_bucket(bucket, SMALL.data.batch_tokens)
        assert bucket.rows <= full.rows
        assert full.rows * max(bucket.source, bucket.target) <= SMALL.data.batch_tokens
