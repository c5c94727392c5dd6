"""The batch shapes for a config, either assumed or taken from its prepared text."""

import itertools
from typing import NamedTuple

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Bucket, max_rows
from transformer_jax.data.encode import Progress, ignore_progress
from transformer_jax.data.prepare import prepare

# The smallest bucket width to assume, unless `data.max_length` is smaller.
MIN_WIDTH = 16


class Shapes(NamedTuple):
    """Batch shapes, and the config with the matching vocabulary sizes."""

    config: Config
    buckets: list[Bucket]
    source: str
    """A description of where the shapes come from, such as "assumed shapes and vocabulary size"."""


def assume_shapes(config: Config) -> Shapes:
    """Return the shapes of full batches whose source and target have equal widths.

    The widths are 16, 32, 64, and so on, up to `data.max_length`. The widest batch needs the most
    memory, so its memory use is an upper bound for any text.
    """
    data = config.data
    doubled = (MIN_WIDTH << i for i in itertools.count())
    widths = [*itertools.takewhile(lambda width: width < data.max_length, doubled), data.max_length]
    buckets = [Bucket(max_rows(data.batch_tokens, width), width, width, 0) for width in widths]
    return Shapes(config, buckets, "assumed shapes and vocabulary size")


def prepare_shapes(config: Config, *, progress: Progress = ignore_progress) -> Shapes:
    """Prepare the config's text, or load it from the cache, and return the shapes of its batches.

    Raises:
        UsageError: the config does not specify the text.
        DataError: the text cannot be used.
        StorageError: the text cannot be downloaded, or the cache cannot be written.
    """
    prepared = prepare(config.data, progress=progress)
    buckets = prepared.batches(config.data, 0).buckets
    config = config.change(data=prepared.vocabulary.sizes)
    return Shapes(config, buckets, f"shapes of {prepared.report['corpus']}")


def largest_bucket(config: Config, buckets: list[Bucket]) -> Bucket:
    """Return the bucket whose activations need the most memory, by a rough estimate."""
    return max(buckets, key=lambda bucket: _count_activations(config, bucket))


def full_bucket(bucket: Bucket, batch_tokens: int) -> Bucket:
    """Return a copy of the bucket with the maximum number of rows for `batch_tokens` tokens."""
    return bucket._replace(rows=max_rows(batch_tokens, max(bucket.source, bucket.target)))


def _count_activations(config: Config, bucket: Bucket) -> float:
    """Estimate how many values a step stores for its backward pass if `model.remat` is False."""
    model, (rows, source, target, _) = config.model, bucket
    layers = LAYER_ACTIVATIONS[model.architecture](model, source, target)
    return rows * (layers + target * config.data.vocab_size)


def transformer_activations(model: ModelConfig, source: int, target: int) -> float:
    """Estimate how many values a Transformer's layers store for one sentence pair."""
    # Each sub-layer stores a few arrays of width d_model; a decoder layer has one more sub-layer
    # than an encoder layer.
    per_token = 8 * model.d_model + 2 * model.d_ff
    # For each query-key pair, each attention head stores a score and an attention weight.
    per_pair = 2 * model.num_heads
    encoder = per_token * source + per_pair * source**2
    decoder = (per_token + 4 * model.d_model) * target
    decoder += per_pair * (target**2 + source * target)
    encoder_depth, decoder_depth = model.layers_per_stack
    return encoder_depth * encoder + decoder_depth * decoder


def recurrent_activations(model: ModelConfig, source: int, target: int) -> float:
    """Estimate how many values recurrent layers store for one sentence pair."""
    # Each cell stores its gates, its states, and the derivatives of its nonlinear functions.
    cells = model.num_layers * 15 * model.d_model * (source + target)
    # All decoder layers share one attention sub-layer with a single head.
    attention = 0 if model.attention_score == "none" else 2 * source * target
    return cells + attention


def convolutional_activations(model: ModelConfig, source: int, target: int) -> float:
    """Estimate how many values convolutional layers store for one sentence pair."""
    # Each layer stores its gates, its output, and the windows that its convolution reads.
    per_token = (model.conv_kernel_width + 6) * model.d_model
    # Each decoder layer attends to the source with a single head.
    decoder = (per_token + 4 * model.d_model) * target + 2 * source * target
    return model.num_layers * (per_token * source + decoder)


LAYER_ACTIVATIONS = {
    "transformer": transformer_activations,
    "rnn": recurrent_activations,
    "conv": convolutional_activations,
}
