"""Test that statistics over seeds agree with textbook formulas."""

import numpy as np
import pytest
from scipy import stats

from transformer_jax.sweeps.seed_statistics import SeedStatistics, detectable_difference

GROUPS = [(5.0, 5.2, 5.1), (4.0, 4.1, 4.2), (5.1, 5.2)]


def test_mean_and_deviation_are_formatted() -> None:
    assert SeedStatistics((5.0, 5.5)).format(2) == "5.25 ± 0.35"
    assert SeedStatistics((5.0,)).deviation is None
    assert SeedStatistics((5.0,)).format(1) == "5.0"


def test_the_detectable_difference_is_that_of_a_t_test_with_pooled_deviation() -> None:
    freedom = sum(len(group) - 1 for group in GROUPS)
    pooled = sum(np.var(group, ddof=1) * (len(group) - 1) for group in GROUPS) / freedom
    expected = stats.t.ppf(0.975, freedom) * np.sqrt((1 / 3 + 1 / 2) * pooled)
    rows = [SeedStatistics(group) for group in GROUPS]
    assert detectable_difference(rows, 3, 2) == pytest.approx(expected)


def test_two_rows_give_the_threshold_of_scipys_t_test() -> None:
    ours, theirs = GROUPS[:2]
    least = detectable_difference([SeedStatistics(ours), SeedStatistics(theirs)], 3, 3)
    assert least is not None
    # Shift one group so that the means differ by exactly the threshold.
    shifted = np.array(theirs) - np.mean(theirs) + np.mean(ours) + least
    assert stats.ttest_ind(ours, shifted).pvalue == pytest.approx(0.05)


def test_single_seeds_have_no_detectable_difference() -> None:
    assert detectable_difference([SeedStatistics((5.0,)), SeedStatistics((4.0,))], 1, 1) is None
    assert detectable_difference([], 1, 1) is None
