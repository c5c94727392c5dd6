"""Statistics of scores over random seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedStatistics:
    """One score of one row, by seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, or None if there is only one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def format(self, digits: int) -> str:
        """Return the mean and the deviation, if there is one, with this number of decimals."""
        mean = f"{self.mean:.{digits}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{digits}f}"


def detectable_difference(
    rows: Sequence[SeedStatistics], num_seeds: int, num_baseline_seeds: int
) -> float | None:
    """Return the smallest difference of two means that seeds alone do not explain.

    If two rows with m and n seeds do not differ, their means differ by more than
    t sqrt(1 / m + 1 / n) s with probability 1 - CONFIDENCE. Here s is the standard deviation over
    seeds, pooled over all rows, and t is the two-sided quantile of Student's distribution.

    Args:
        rows: the score of every row.
        num_seeds: m.
        num_baseline_seeds: n.

    Returns:
        The difference, or None if every row has only one seed.
    """
    groups = [row.values for row in rows if len(row.values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return None
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    return (
        quantile * math.sqrt(1 / num_seeds + 1 / num_baseline_seeds) * math.sqrt(squares / freedom)
    )
