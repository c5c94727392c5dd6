"""The FLOPs of a training step and the devices' peak FLOP/s, from which utilization is computed.

Shapes: B sentence pairs in a batch.
"""

import timeit

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from transformer_jax.baselines.flops import (
    convolutional_multiply_adds,
    recurrent_multiply_adds,
)
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.special_tokens import PAD

# Peak dense bfloat16 FLOP/s of each device, from the vendors' data sheets. The keys are prefixes of
# JAX's `device_kind`, and the longest matching prefix applies. Some devices have two names in JAX.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}

# The number of tokens in a typical sentence, for estimates made before any text is read.
TYPICAL_LENGTH = 32


def step_flops(config: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """Return the FLOPs of a training step on a batch, excluding padding."""
    source, target = ((side != PAD).sum(axis=1) for side in batch)
    return flops_of_lengths(config, vocab_size, source, target)


def flops_of_lengths(
    config: ModelConfig,
    vocab_size: int,
    source_lengths: Int[np.ndarray, " B"],
    target_lengths: Int[np.ndarray, " B"],
) -> float:
    """Return the FLOPs of a training step on B pairs: three times the FLOPs of a forward pass.

    Only matrix products are counted. The sum over dimensions in an additive score counts as a dot
    product. Each operation is counted only once, even if `model.remat` repeats it.
    """
    source, target = source_lengths.astype(float), target_lengths.astype(float)
    layers = MULTIPLY_ADDS[config.architecture](config, source, target)
    # Each multiply-add counts as two FLOPs.
    return float(3 * 2 * (layers + config.d_model * vocab_size * target.sum()))


def transformer_multiply_adds(
    config: ModelConfig, source: Float[np.ndarray, " B"], target: Float[np.ndarray, " B"]
) -> float:
    """Return the number of multiply-adds in a Transformer's layers, given the sentence lengths."""
    d, heads = config.d_model, config.num_heads
    # Multiply-adds per token. The query and output projections cost as much as the key and value
    # projections.
    keys_values = queries_output = d * heads * (config.d_k + config.d_v)
    feed_forward = 2 * d * config.d_ff
    encoder = (keys_values + queries_output + feed_forward) * source.sum()
    decoder = (keys_values + 2 * queries_output + feed_forward) * target.sum()
    decoder += keys_values * source.sum()
    width = heads * (config.d_k + config.d_v)
    encoder += width * np.sum(_count_pairs(config, source))
    decoder += width * np.sum(_count_pairs(config, target) + target * source)
    if config.attention_score == "general":
        encoder += heads * config.d_k**2 * source.sum()
        decoder += heads * config.d_k**2 * 2 * target.sum()
    if config.positions == "relative":
        vectors = 2 * config.max_relative_position + 1
        encoder += heads * config.d_k * vectors * source.sum()
        encoder += heads * config.d_v * np.sum(source * source)
        decoder += heads * config.d_k * vectors * target.sum()
        decoder += heads * config.d_v * np.sum(target * target)
    encoder_depth, decoder_depth = config.layers_per_stack
    return float(encoder_depth * encoder + decoder_depth * decoder)


def _count_pairs(config: ModelConfig, lengths: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Return the number of query-key pairs in self-attention, for each sentence."""
    # A window at the edge of a sentence contains fewer positions.
    farthest = lengths - 1
    window = np.minimum(farthest, config.attention_window or farthest)
    return lengths * (2 * window + 1) - window * (window + 1)


MULTIPLY_ADDS = {
    "transformer": transformer_multiply_adds,
    "rnn": recurrent_multiply_adds,
    "conv": convolutional_multiply_adds,
}


def train_flops(config: Config) -> float:
    """Estimate a whole run's FLOPs, assuming full batches of `TYPICAL_LENGTH`-token sentences.

    The estimate is usually too high, because real batches contain padding, which does not count,
    and source and target sentences differ in length. For example, a batch of number words needs
    only about 60% of the estimated FLOPs.
    """
    length = min(TYPICAL_LENGTH, config.data.max_length)
    side = np.ones((max(1, config.data.batch_tokens // length), length), np.int32)
    return config.train.steps * step_flops(config.model, config.data.vocab_size, Batch(side, side))


def peak_flops(dtype: str) -> float:
    """Return the total peak FLOP/s of all local devices.

    For bfloat16 on a device in `PEAK_FLOPS`, use the vendor's figure. Otherwise, time a few matrix
    products and use the highest rate.
    """
    devices = jax.local_devices()
    kind = devices[0].device_kind
    prefixes = [prefix for prefix in PEAK_FLOPS if kind.startswith(prefix)]
    if prefixes and dtype == "bfloat16":
        return len(devices) * PEAK_FLOPS[max(prefixes, key=len)]
    size = 1024 if devices[0].platform == "cpu" else 8192
    matrix = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    # The first timing includes compilation, so exclude it below.
    seconds = timeit.repeat(
        lambda: multiply(matrix, matrix).block_until_ready(), number=1, repeat=6
    )
    # Simulated CPU devices share one processor.
    count = 1 if devices[0].platform == "cpu" else len(devices)
    return count * 2 * size**3 / min(seconds[1:])
