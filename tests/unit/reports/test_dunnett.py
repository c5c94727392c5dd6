"""Test Dunnett's distribution against his published table, a double integral, and SciPy."""

import numpy as np
import pytest
from scipy import stats

from transformer_jax.reports.dunnett import Correlation, dunnett_probability, dunnett_quantile


def equal_correlations(size: int) -> Correlation:
    """Return the correlations between comparisons with a shared baseline in a balanced design."""
    return tuple(tuple(1.0 if i == j else 0.5 for j in range(size)) for i in range(size))


# The two-sided 5% critical values are from Dunnett (1964). Each tuple contains the number of
# comparisons, the degrees of freedom, and the critical value.
@pytest.mark.parametrize(
    ("size", "freedom", "value"),
    [(1, 5, 2.57), (2, 5, 3.03), (5, 5, 3.62), (3, 10, 2.76), (9, 20, 2.95), (2, 10**6, 2.21)],
)
def test_critical_values_are_those_of_dunnetts_table(size: int, freedom: int, value: float) -> None:
    critical = dunnett_quantile(0.95, equal_correlations(size), freedom)
    assert critical == pytest.approx(value, abs=0.006)


@pytest.mark.parametrize(("size", "freedom"), [(4, 10), (10, 20), (19, 38)])
def test_the_probability_is_the_double_integral_over_baseline_and_deviation(
    size: int, freedom: int
) -> None:
    bound = 2.9
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    deviations = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, freedom) / freedom)
    # Each statistic is (z - z_base) / sqrt(2) / deviation, where every z is an independent standard
    # normal variable.
    limits = bound * np.sqrt(2) * deviations[:, None]
    inside = stats.norm.cdf(nodes + limits) - stats.norm.cdf(nodes - limits)
    expected = (inside**size @ weights / weights.sum()).mean()
    probability = dunnett_probability(bound, equal_correlations(size), freedom)
    assert probability == pytest.approx(expected, abs=5e-4)


def test_without_blocks_the_p_values_are_scipys() -> None:
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(5, 4)) + 0.8 * np.arange(5)[:, None]
    pooled = np.sqrt(groups.var(axis=1, ddof=1).mean() / 2)
    statistics = (groups[1:].mean(axis=1) - groups[0].mean()) / pooled
    ours = [1 - dunnett_probability(abs(t), equal_correlations(4), 15) for t in statistics]
    theirs = stats.dunnett(*groups[1:], control=groups[0]).pvalue
    np.testing.assert_allclose(ours, theirs, atol=5e-3)
    assert min(ours) < 0.05 < max(ours)
