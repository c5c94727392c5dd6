"""The distribution of the largest magnitude among correlated Student variables (Dunnett, 1955)."""

import functools

import numpy as np
from jaxtyping import Float
from scipy import optimize, special, stats

# A matrix as nested tuples, which are hashable, so that a function can cache its results.
Correlation = tuple[tuple[float, ...], ...]


def dunnett_probability(bound: float, correlation: Correlation, freedom: int) -> float:
    """Return the probability that no statistic of a multivariate t exceeds a bound in magnitude."""
    if not bound:
        return 0.0
    maxima = _normal_maxima(correlation)
    return float(special.chdtrc(freedom, freedom * (maxima / bound) ** 2).mean())


@functools.lru_cache
def dunnett_quantile(confidence: float, correlation: Correlation, freedom: int) -> float:
    """Return the bound such that, with this probability, no statistic exceeds it in magnitude."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, correlation, freedom) - confidence

    return float(optimize.root_scalar(excess, bracket=(1e-3, 1e6)).root)


@functools.lru_cache
def _normal_maxima(correlation: Correlation) -> Float[np.ndarray, " N"]:
    """Return quantiles of the largest magnitude among correlated normal numbers.

    A Sobol sequence replaces random numbers, so the result is accurate and deterministic. The means
    of 64 neighbors are as accurate as all magnitudes and need less time.
    """
    size = len(correlation)
    points = stats.qmc.Sobol(size, scramble=False).random_base2(16)
    # A shift modulo 1 avoids 0, at which the normal quantile is infinite.
    points = (points + np.random.default_rng(0).random(size)) % 1
    normal = special.ndtri(points) @ np.linalg.cholesky(np.array(correlation)).T
    return np.sort(np.abs(normal).max(axis=1)).reshape(-1, 64).mean(axis=1)
