"""Measure the quantities in Table 1: each layer type's cost and maximum path length.

The paper derives complexity, sequential operations, and maximum path length by hand. This module
computes these quantities by analyzing each layer's program, and it fits power laws to them. Time
and memory are measured on JAX's default device.

Shapes: B batch, T positions, D d_model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array

from experiments.paper.layers import LAYERS
from experiments.paper.program import analyze
from transformer_jax import progress
from transformer_jax.model.encoder_decoder import Params

# A layer's reach is measured from the middle of a sequence of this length. The length must exceed
# twice the window of restricted self-attention.
PROBE_LENGTH = 256
PROBE_WIDTH = 16
REPEATS = 5
# By default, XLA's CPU compiler fuses attention over long sequences into one kernel and does not
# report the kernel's memory use, which grows with n^2. This option turns off fused kernels.
CPU_OPTIONS: dict[str, bool | str] = {"xla_cpu_experimental_ynn_fusion_type": ""}


@dataclass(frozen=True)
class Claim:
    """The paper's bounds for a layer type (Table 1).

    Table 1 omits separable convolutions. For them, the complexity comes from section 4, and the
    other bounds are the same as for convolutions.
    """

    complexity: str
    sequential: str
    path: str


CLAIMS: Mapping[str, Claim] = {
    "Self-Attention": Claim("O(n² d)", "O(1)", "O(1)"),
    "Recurrent": Claim("O(n d²)", "O(n)", "O(n)"),
    "Convolutional": Claim("O(k n d²)", "O(1)", "O(log_k(n))"),
    "Separable Convolutional": Claim("O(k n d + n d²)", "O(1)", "O(log_k(n))"),
    "Self-Attention (restricted)": Claim("O(r n d)", "O(1)", "O(n/r)"),
}


@dataclass(frozen=True)
class Measurement:
    """A layer's properties for n positions and width d.

    Only `bytes` and `seconds` depend on the device.
    """

    layer: str
    n: int
    d: int
    flops: int
    """The FLOPs that the paper counts: those of the layer's matrix products, excluding attention's
    projections."""
    all_flops: int
    """The FLOPs of all matrix products, including attention's projections."""
    sequential: int
    """The length of the longest chain of dependent matrix products."""
    path: int
    """The number of layers or loop iterations between the two ends of the sequence."""
    bytes: int | None = None
    """The memory for intermediate results and the output, according to the compiler."""
    seconds: float | None = None
    """The time for a forward pass on one sequence: the fastest of `REPEATS` runs."""


def measure_layers(
    lengths: Sequence[int],
    widths: Sequence[int],
    *,
    timed: bool = True,
) -> list[Measurement]:
    """Measure each layer type for each n in `lengths` and each d in `widths`.

    Time and memory are measured only if `timed` is true.
    """
    cases = [(name, n, d) for name in LAYERS for d in widths for n in lengths]
    reaches = {name: measure_reach(LAYERS[name](d_model=PROBE_WIDTH)) for name in LAYERS}
    results: list[Measurement] = []
    for index, (name, n, d) in enumerate(cases):
        progress.report(f"measuring {name}", index, len(cases))
        results.append(_measure(name, n, d, reaches[name], timed=timed))
    return results


def measure_reach(layer: nn.Module) -> int | None:
    """Return the largest distance from an output to an input that affects it, or None if unlimited.

    A layer's reach is unlimited if one end of the sequence affects an output in the middle.
    """
    shape, middle = (1, PROBE_LENGTH, PROBE_WIDTH), PROBE_LENGTH // 2
    x = jax.random.normal(jax.random.key(0), shape)
    params = layer.init(jax.random.key(1), x)

    def output(x: Array) -> Array:
        # Without a large factor, the gradient would underflow to zero after many recurrent steps.
        return 1e30 * jnp.asarray(layer.apply(params, x))[0, middle].sum()

    gradient = np.asarray(jax.jit(jax.grad(output))(x))[0]
    reached = np.flatnonzero(np.any(gradient != 0, axis=-1))
    first, last = int(reached[0]), int(reached[-1])
    is_unlimited = first == 0 or last == PROBE_LENGTH - 1
    return None if is_unlimited else max(middle - first, last - middle)


def path_length(n: int, reach: int | None, trips: int) -> int:
    """Return the number of layers or loop iterations between the first and last of n positions.

    Layers with limited reach are stacked until the first position affects the last.
    """
    layers = 1 if reach is None else max(1, -(-(n - 1) // reach))
    return layers * max(trips, 1)


def _measure(name: str, n: int, d: int, reach: int | None, *, timed: bool) -> Measurement:
    layer, x = LAYERS[name](d_model=d), jax.ShapeDtypeStruct((1, n, d), jnp.float32)
    params: Params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def apply(params: Params, x: Array) -> Array:
        return jnp.asarray(layer.apply(params, x))

    program = analyze(apply, params, x)
    flops = program.data_flops or program.flops
    path = path_length(n, reach, program.trips)
    exact = Measurement(name, n, d, flops, program.flops, program.sequential, path)
    if not timed:
        return exact
    seconds, size = measure_program(layer, x)
    return replace(exact, bytes=size, seconds=seconds)


def measure_program(layer: nn.Module, x: jax.ShapeDtypeStruct) -> tuple[float, int]:
    """Return the time in seconds and the memory in bytes of a layer's forward pass.

    The time is that of the fastest of `REPEATS` runs.
    """
    params: Params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def apply(params: Params, x: Array) -> Array:
        return jnp.asarray(layer.apply(params, x))

    compiled = _compile(jax.jit(apply).lower(params, x))
    memory: Any = compiled.memory_analysis()
    size = memory.temp_size_in_bytes + memory.output_size_in_bytes
    filled = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), (params, x))
    seconds = [_time(lambda: compiled(*filled)) for _ in range(REPEATS + 1)]
    # The first run includes one-time costs.
    return min(seconds[1:]), int(size)


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program, avoiding kernels whose memory use the compiler does not report."""
    if jax.default_backend() != "cpu":
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=CPU_OPTIONS)
    except jax.errors.JaxRuntimeError:
        # This version of XLA does not support the option.
        return lowered.compile()


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of the least-squares fit y = c x^p."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
