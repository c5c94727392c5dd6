"""The distribution of the largest absolute value among correlated t statistics (Dunnett, 1955)."""

import functools

import numpy as np
from jaxtyping import Float
from scipy import optimize, special, stats

# A correlation matrix, stored as nested tuples because `lru_cache` requires hashable arguments.
Correlation = tuple[tuple[float, ...], ...]


def dunnett_probability(bound: float, correlation: Correlation, freedom: int) -> float:
    """Return the probability that all correlated t statistics are within `bound` of zero."""
    if not bound:
        return 0.0
    maxima = _normal_maxima(correlation)
    return float(special.chdtrc(freedom, freedom * (maxima / bound) ** 2).mean())


@functools.lru_cache
def dunnett_quantile(confidence: float, correlation: Correlation, freedom: int) -> float:
    """Return the bound for which `dunnett_probability` equals `confidence`."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, correlation, freedom) - confidence

    return float(optimize.root_scalar(excess, bracket=(1e-3, 1e6)).root)


@functools.lru_cache
def _normal_maxima(correlation: Correlation) -> Float[np.ndarray, " N"]:
    """Return quantiles of the largest absolute value among correlated normal variables.

    The samples come from a Sobol sequence, so the result is accurate and deterministic. To
    save time, each group of 64 adjacent quantiles is averaged, with almost no loss of accuracy.
    """
    size = len(correlation)
    points = stats.qmc.Sobol(size, scramble=False).random_base2(16)
    # Shift the points modulo 1 to avoid 0, where the normal quantile is infinite.
    points = (points + np.random.default_rng(0).random(size)) % 1
    normal = special.ndtri(points) @ np.linalg.cholesky(np.array(correlation)).T
    return np.sort(np.abs(normal).max(axis=1)).reshape(-1, 64).mean(axis=1)
