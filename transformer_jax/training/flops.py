"""How much arithmetic a step is, and how much the device could do: model-FLOPs utilisation."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.special_tokens import PAD

# Dense bfloat16 peaks of the makers' data sheets, in FLOP/s, by the beginning of the name
# that JAX gives the device. Of several that fit, the longest counts.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}

# Pieces of a sentence, where none is at hand.
TYPICAL_LENGTH = 32


def step_flops(config: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """Return the floating-point operations that a training step needs: three forward passes.

    Matrix products of tokens are counted, padding is not; attention is of each row's own
    lengths. The sum of an additive score counts as the dot product that it replaces. What remat
    computes twice counts once.
    """
    source, target = ((side != PAD).sum(axis=1).astype(float) for side in batch)
    d, heads = config.d_model, config.num_heads
    keys_values = d * heads * (config.d_k + config.d_v)
    queries_output = keys_values
    feed_forward = 2 * d * config.d_ff
    encoder = (keys_values + queries_output + feed_forward) * source.sum()
    decoder = (keys_values + 2 * queries_output + feed_forward) * target.sum()
    decoder += keys_values * source.sum()
    pairs = np.sum(source * source + target * target + target * source)
    attention = heads * (config.d_k + config.d_v) * pairs
    if config.attention_score == "general":
        attention += heads * config.d_k**2 * (source + 2 * target).sum()
    if config.positions == "relative":
        vectors = 2 * config.max_relative_position + 1
        attention += heads * config.d_k * vectors * (source + target).sum()
        attention += heads * config.d_v * np.sum(source * source + target * target)
    products = config.num_layers * (encoder + decoder + attention) + d * vocab_size * target.sum()
    return float(3 * 2 * products)


def train_flops(config: Config) -> float:
    """Return about how many floating-point operations a whole training takes.

    Counted for full batches of sentences of a usual length, without reading any text.
    """
    length = min(TYPICAL_LENGTH, config.data.max_length)
    side = np.ones((max(1, config.data.batch_tokens // length), length), np.int32)
    step = step_flops(config.model, config.data.vocab_size, Batch(side, side))
    return config.train.steps * step


def peak_flops(dtype: str) -> float:
    """Return what all local devices could do in a second.

    The maker's figure for bfloat16 where it is known; else, as on a CPU or in float32, the
    best of a few matrix products that are timed here.
    """
    devices = jax.local_devices()
    kind = devices[0].device_kind
    known = [name for name in PEAKS if kind.startswith(name)]
    if known and dtype == "bfloat16":
        return len(devices) * PEAKS[max(known, key=len)]
    size = 1024 if devices[0].platform == "cpu" else 8192
    matrix = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        multiply(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    # Simulated devices share one processor.
    count = 1 if devices[0].platform == "cpu" else len(devices)
    return count * 2 * size**3 / min(seconds)
