"""The FLOPs of a training step and the devices' peak FLOP/s, from which utilization is computed.

The FLOPs are read from the traced forward pass, so they include those of all registered parts.
Shapes: B sentence pairs in a batch.
"""

import functools
import math
import timeit
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jaxtyping import Int

from transformer_jax.baselines.build import build_model
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.target_platform import tracing_for
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


# The forward pass is traced for sentences of one, two, and three times this length, or less if the
# model does not have enough positions.
PROBE_LENGTH = 64


def batch_flops(config: ModelConfig, vocab_size: int, batch: Batch) -> float:
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

    Each dot product counts once, even with `model.remat`. Attention counts as full attention,
    excluding pairs of positions outside the attention window.
    """
    source, target = source_lengths.astype(np.int64), target_lengths.astype(np.int64)
    pairs = (_count_pairs(config, lengths).sum() for lengths in (source, target))
    sums = 1, source.sum(), target.sum(), (source * target).sum(), *pairs
    terms = zip(_forward_terms(config, vocab_size), sums, strict=True)
    return float(3 * sum(term * int(x) for term, x in terms))


def _count_pairs(config: ModelConfig, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Return the number of query-key pairs in self-attention for each sentence."""
    # A window at the edge of a sentence contains fewer positions.
    farthest = lengths - 1
    window = np.minimum(farthest, config.attention_window or farthest)
    return lengths * (2 * window + 1) - window * (window + 1)


def plain_config(config: ModelConfig) -> ModelConfig:
    """Return the config without an attention window or options that only save time or memory."""
    is_fused, attention = config.has_fused_attention, config.attention_implementation
    return replace(
        config,
        attention_implementation="full" if is_fused else attention,
        attention_window=None,
        remat=False,
        dtype="float32" if config.dtype == "float64" else config.dtype,
        max_length=max(3, config.max_length),
        max_positions=config.max_positions and max(3, config.max_positions),
    )


@functools.cache
def _forward_terms(config: ModelConfig, vocab_size: int) -> tuple[Fraction, ...]:
    """Return the coefficients of 1, S, T, ST, S^2, and T^2 in the FLOPs of a forward pass.

    S and T are the lengths of the source and the target. The constant counts once for each batch,
    because it comes from products of parameters.
    """
    model = build_model(plain_config(config), vocab_size)
    limits = model.config.max_length, *model.config.max_positions_per_stack
    unit = min(PROBE_LENGTH, min(limits) // 3)

    def count(source: int, target: int) -> int:
        return _forward_flops(model, source * unit, target * unit)

    start, source, target = count(1, 1), count(2, 1), count(1, 2)
    square = unit**2
    source_pairs = Fraction(count(3, 1) - 2 * source + start, 2 * square)
    target_pairs = Fraction(count(1, 3) - 2 * target + start, 2 * square)
    pairs = Fraction(count(2, 2) - source - target + start, square)
    per_source = Fraction(source - start, unit) - unit * (pairs + 3 * source_pairs)
    per_target = Fraction(target - start, unit) - unit * (pairs + 3 * target_pairs)
    lengths = unit * (per_source + per_target)
    constant = start - lengths - square * (pairs + source_pairs + target_pairs)
    return constant, per_source, per_target, pairs, source_pairs, target_pairs


def _forward_flops(model: EncoderDecoder, source: int, target: int) -> int:
    shapes = (jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (source, target))

    def forward(params: Params, *batch: jax.Array) -> object:
        return model.apply({"params": params}, *batch)

    # The FLOPs do not depend on the platform. JAX does not initialize its devices if the platform
    # is given.
    with tracing_for("cpu"):
        return count_flops(jax.make_jaxpr(forward)(abstract_params(model), *shapes).jaxpr)


def count_flops(jaxpr: Jaxpr) -> int:
    """Return the FLOPs of all dot products in a traced function, counting two per multiply-add.

    Dot products include matrix products, convolutions, and sums of elementwise products. The body
    of a `scan` counts once for each iteration, and the body of a `while` loop counts once. A `cond`
    counts as its most expensive branch.
    """
    total = 0
    products = set[Var]()
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        if name in PRODUCTS:
            total += PRODUCTS[name](equation)
        elif name == "mul" and len({x for x in inputs if isinstance(x, Var)}) == 2:
            products |= set(equation.outvars)
        elif name == "reduce_sum" and inputs[0] in products:
            total += 2 * math.prod(shape_of(inputs[0]))
        inner = [count_flops(x) for x in _inner_jaxprs(equation)]
        if inner:
            once = max(inner) if name == "cond" else sum(inner)
            total += once * (equation.params["length"] if name == "scan" else 1)
    return total


def _inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the functions that an equation calls, such as the body of a loop."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            inner = getattr(item, "jaxpr", item)
            if isinstance(inner, Jaxpr):
                yield inner


def shape_of(variable: Any) -> tuple[int, ...]:  # noqa: ANN401 (`Var.aval` is declared without a shape)
    """Return the shape of a variable in a traced function."""
    return variable.aval.shape


def _dot_flops(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, output = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    return 2 * math.prod(output) * math.prod(left[axis] for axis in contracted)


def _convolution_flops(equation: JaxprEqn) -> int:
    kernel, output = shape_of(equation.invars[1]), shape_of(equation.outvars[0])
    num_outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(output) * math.prod(kernel) // num_outputs


PRODUCTS = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}
"""Functions that return the FLOPs of an equation, keyed by the name of its primitive."""


def train_flops(config: Config) -> float:
    """Estimate a whole run's FLOPs, assuming full batches of `TYPICAL_LENGTH`-token sentences.

    The estimate is usually too high: a batch of number words needs about 60% of it. It ignores
    `model.attention_window`.
    """
    length = min(TYPICAL_LENGTH, config.data.max_length)
    rows = max(1, config.data.batch_tokens // length)
    # A single trace is enough for a single length.
    model = build_model(plain_config(config.model), config.data.vocab_size)
    return 3.0 * config.train.steps * rows * _forward_flops(model, length, length)


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
    matrix = jax.device_put(np.ones((size, size), jnp.dtype(dtype)))
    multiply = jax.jit(jnp.matmul)
    # The first timing includes compilation, so exclude it below.
    seconds = timeit.repeat(
        lambda: multiply(matrix, matrix).block_until_ready(), number=1, repeat=6
    )
    # Simulated CPU devices share one processor.
    count = 1 if devices[0].platform == "cpu" else len(devices)
    return count * 2 * size**3 / min(seconds[1:])
