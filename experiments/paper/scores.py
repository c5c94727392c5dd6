"""Measure additive and dot-product attention by d_k (section 3.2.1).

According to the paper, the two scores have a similar theoretical complexity, but dot-product
attention is much faster and needs less memory, because it consists of matrix products. Time and
memory are those of the attention of one sequence with itself, on JAX's default device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from experiments.paper.table1 import measure_program
from transformer_jax import progress
from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import masked_softmax, weighted_sum
from transformer_jax.model.build import choose_components

NUM_HEADS = 8
SCORES = ("scaled_dot_product", "additive")


class Measurement(NamedTuple):
    """The cost of attention with one score."""

    score: str
    n: int
    """The number of queries, which is also the number of keys."""
    d_k: int
    seconds: float
    bytes: int
    """The memory for intermediate results and the output."""


class Attention(nn.Module):
    """Attention without projections, in which values have the same width as keys."""

    score: str

    @nn.compact
    def __call__(self, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        """Attend from each position to all positions."""
        config = ModelConfig(attention_score=self.score)
        score = choose_components(config).make_score(config)
        mask = jnp.ones((1, 1, 1, x.shape[1]), bool)
        return weighted_sum(masked_softmax(score(x, x), mask), x)


def measure_scores(lengths: Sequence[int], widths: Sequence[int]) -> list[Measurement]:
    """Measure each score for each n in `lengths` and each d_k in `widths`."""
    cases = [(score, n, d_k) for n in lengths for d_k in widths for score in SCORES]
    results: list[Measurement] = []
    for index, (score, n, d_k) in enumerate(cases):
        progress.report(f"measuring {score}", index, len(cases))
        x = jax.ShapeDtypeStruct((1, n, NUM_HEADS, d_k), jnp.float32)
        seconds, size = measure_program(Attention(score), x)
        results.append(Measurement(score, n, d_k, seconds, size))
    return results


def summarize(measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a table with a line for each n and d_k, which compares both scores."""
    table = [["n", "d_k", "dot product", "additive", "times", "dot product", "additive", "times"]]
    for dot, additive in zip(measurements[::2], measurements[1::2], strict=True):
        table.append(
            [
                f"{dot.n:,}",
                f"{dot.d_k}",
                *(f"{1000 * x.seconds:.3g} ms" for x in (dot, additive)),
                f"{additive.seconds / dot.seconds:.1f}",
                *(f"{x.bytes / 1e6:.3g} MB" for x in (dot, additive)),
                f"{additive.bytes / dot.bytes:.1f}",
            ]
        )
    return table
