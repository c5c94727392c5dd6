"""The batch shapes for a config, either assumed or taken from its prepared text."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Bucket, max_rows
from transformer_jax.data.prepare import prepare_text
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params, make_rng
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.target_platform import tracing_for
from transformer_jax.training.flops import plain_config

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


def prepare_shapes(config: Config) -> Shapes:
    """Prepare the config's text, or load it from the cache; return the shapes of its batches."""
    prepared = prepare_text(config.data)
    buckets = prepared.batches(config).buckets
    config = config.change(data=prepared.vocabulary.sizes)
    return Shapes(config, buckets, f"shapes of {prepared.report['corpus']}")


def largest_bucket(config: Config, buckets: list[Bucket]) -> Bucket:
    """Return the bucket that stores the most values for its backward pass without `remat`."""
    data = config.data
    model = build_model(plain_config(config.model), data.vocab_size, data.source_vocab_size)
    return max(buckets, key=lambda bucket: count_residuals(model, bucket))


def count_residuals(model: EncoderDecoder, bucket: Bucket) -> int:
    """Return how many floating-point values the forward pass stores for the backward pass."""
    shapes = ((bucket.rows, length) for length in (bucket.source, bucket.target))
    batch = Batch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

    def loss(params: Params, batch: Batch) -> Array:
        rngs = {"dropout": make_rng(0)}
        logits = jnp.asarray(model.apply({"params": params}, *batch, train=True, rngs=rngs))
        return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1).sum()

    def backward(params: Params, batch: Batch) -> Callable[..., object]:
        return jax.vjp(lambda params: loss(params, batch), params)[1]

    with tracing_for("cpu"):
        residuals = jax.eval_shape(backward, abstract_params(model), batch)
    arrays: list[jax.ShapeDtypeStruct] = jax.tree.leaves(residuals)
    return sum(x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))


def full_bucket(bucket: Bucket, batch_tokens: int) -> Bucket:
    """Return a copy of the bucket with the maximum number of rows for `batch_tokens` tokens."""
    return bucket._replace(rows=max_rows(batch_tokens, max(bucket.source, bucket.target)))
