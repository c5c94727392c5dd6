"""Compare the rows of an ablation over random seeds: the analysis of docs/statistics.md.

Scores are plain numbers by row and seed, and the first row is the baseline. Perplexities enter as
logarithms: a difference of 1 perplexity is large at perplexity 5 and small at perplexity 30.
"""

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special, stats

CONFIDENCE = 0.95
# Smaller differences do not matter: half of the smallest difference that the paper interprets.
LOG_PERPLEXITY_MARGIN = 0.01
BLEU_MARGIN = 0.2
# A row is wide if its standard deviation exceeds the typical one by more than this factor.
WIDE_RATIO = 4.0

Scores = Mapping[str, Mapping[int, float]]
Verdict = Literal["as in the paper", "differs", "inconclusive"]
# The cache of Dunnett's distribution needs hashable keys.
Correlation = tuple[tuple[float, ...], ...]


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


class Interval(NamedTuple):
    """A confidence interval of a difference."""

    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """The difference of one row from the first row: the row's score minus the first row's."""

    by_seed: Mapping[int, float]
    """The difference for each seed that both rows have."""
    difference: float | None
    """The estimate, in the middle of `interval`. None if one of the rows has no score."""
    interval: Interval | None = None
    """The interval for all statements about the row: 95 % for all rows together. None if this row
    or the first one has fewer than two seeds."""
    p: float | None = None
    """Dunnett's p-value. None if `interval` is Welch's with Bonferroni's correction."""
    welch: Interval | None = None
    """Welch's 95 % interval, from these two rows alone, without correction for the others."""


@dataclass(frozen=True)
class Analysis:
    """The comparison of all rows with the first row."""

    base: str
    comparisons: Mapping[str, Comparison]
    """All rows except the first, by name."""
    wide: Mapping[str, float]
    """The rows that vary much more over seeds than others: the ratio of the standard deviation to
    the typical one. They are not pooled with the others."""
    deviation: float | None
    """The residual standard deviation, pooled over rows. None without degrees of freedom."""
    freedom: int
    """The residual degrees of freedom."""


class SignAgreement(NamedTuple):
    """The number of rows whose difference from the first row has the same sign as in the paper."""

    same: int
    rows: int
    """The number of rows with a score for which the paper claims a sign."""
    p: float
    """The probability that fair coins agree with the paper in at least as many rows."""


def failed_runs(perplexity: Scores, unigram: float | None = None) -> list[tuple[str, int]]:
    """Return the row and seed of each run that failed to train.

    Args:
        perplexity: perplexities, not their logarithms.
        unigram: the perplexity of a unigram model on the same text. If it is None, only runs
            without a finite perplexity have failed.
    """
    limit = math.inf if unigram is None else unigram
    return [
        (row, seed)
        for row, by_seed in perplexity.items()
        for seed, value in by_seed.items()
        if not (math.isfinite(value) and value <= limit)
    ]


def analyze(scores: Scores, failed: Collection[tuple[str, int]] = ()) -> Analysis:
    """Compare every row with the first row.

    Args:
        scores: the scores by row and seed. A row may lack seeds.
        failed: the row and seed of each run to exclude.
    """
    kept = {
        row: {seed: score for seed, score in by_seed.items() if (row, seed) not in failed}
        for row, by_seed in scores.items()
    }
    base, *others = kept
    comparisons = {row: _compare_means(kept[row], kept[base]) for row in others}
    compared = [row for row in others if comparisons[row].welch]
    for row in compared:
        ours, theirs = list(kept[row].values()), list(kept[base].values())
        interval = welch_interval(ours, theirs, 1 - (1 - CONFIDENCE) / len(compared))
        comparisons[row] = replace(comparisons[row], interval=interval)
    repeated = {row: by_seed for row, by_seed in kept.items() if len(by_seed) > 1}
    wide = _find_wide(repeated) if repeated else {}
    fit = _fit({row: by_seed for row, by_seed in repeated.items() if row not in wide}, base)
    # Rows in the fit replace Bonferroni's correction by Dunnett's, which is exact.
    for row, (difference, error) in fit.differences.items():
        share = len(fit.differences) / len(compared)
        half = error * dunnett_quantile(1 - (1 - CONFIDENCE) * share, fit.correlation, fit.freedom)
        ratio = abs(difference) / error if error else math.inf if difference else 0.0
        p = (1 - dunnett_probability(ratio, fit.correlation, fit.freedom)) / share
        interval = Interval(difference - half, difference + half)
        comparisons[row] = replace(
            comparisons[row], difference=difference, interval=interval, p=min(1.0, p)
        )
    return Analysis(base, comparisons, wide, fit.deviation, fit.freedom)


def _compare_means(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Comparison:
    by_seed = {seed: score - theirs[seed] for seed, score in ours.items() if seed in theirs}
    if not (ours and theirs):
        return Comparison(by_seed, None)
    difference = statistics.fmean(ours.values()) - statistics.fmean(theirs.values())
    welch = welch_interval(list(ours.values()), list(theirs.values()))
    return Comparison(by_seed, difference, welch=welch)


def _find_wide(scores: Scores) -> dict[str, float]:
    """Return the ratio of each wide standard deviation to the typical one."""
    # Each variance is divided by the median of its distribution, so that their median is unbiased.
    typical = statistics.median(
        statistics.variance(by_seed.values())
        * (n := len(by_seed) - 1)
        / float(stats.chi2.median(n))
        for by_seed in scores.values()
    )
    deviations = {row: statistics.stdev(by_seed.values()) for row, by_seed in scores.items()}
    return {
        row: deviation / math.sqrt(typical) if typical else math.inf
        for row, deviation in deviations.items()
        if deviation > WIDE_RATIO * math.sqrt(typical)
    }


@dataclass(frozen=True)
class _Fit:
    """The additive model: a score is the effect of its row, that of its seed, and an error."""

    differences: Mapping[str, tuple[float, float]]
    """By row, the estimated difference from the first row and its standard error."""
    correlation: Correlation
    """The correlations of these differences."""
    deviation: float | None
    freedom: int


def _fit(scores: Scores, base: str) -> _Fit:
    """Fit the model by least squares, which also handles missing seeds."""
    rows = [row for row in scores if row != base]
    seeds = sorted({seed for by_seed in scores.values() for seed in by_seed})
    cells = [(row, seed) for row, by_seed in scores.items() for seed in by_seed]
    if base not in scores or not rows:
        return _Fit({}, (), None, 0)
    design = np.array(
        [[row == x for x in rows] + [seed == x for x in seeds] for row, seed in cells], float
    )
    values = np.array([scores[row][seed] for row, seed in cells])
    freedom = len(cells) - int(np.linalg.matrix_rank(design))
    if not freedom:
        return _Fit({}, (), None, 0)
    inverse = np.linalg.pinv(design)
    effects = inverse @ values
    # Rounding removes the noise of floating-point numbers if all differences are equal.
    deviation = round(math.sqrt(np.sum((values - design @ effects) ** 2) / freedom), 12)
    # A row is comparable if seeds that it shares with others connect it to the first row.
    is_comparable = np.isclose(np.diag(inverse @ design), 1.0)[: len(rows)]
    chosen = np.flatnonzero(is_comparable)
    covariance = (inverse @ inverse.T)[np.ix_(chosen, chosen)]
    scale = np.sqrt(np.diag(covariance))
    correlation = (covariance / np.outer(scale, scale)).round(12)
    differences = {
        rows[k]: (round(float(effects[k]), 12), deviation * float(factor))
        for k, factor in zip(chosen, scale, strict=True)
    }
    return _Fit(differences, tuple(map(tuple, correlation.tolist())), deviation, freedom)


def welch_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Return Welch's interval of the difference of two means; None without two scores each."""
    if min(len(ours), len(theirs)) < 2:
        return None
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [(statistics.variance(x) / len(x), len(x) - 1) for x in (ours, theirs)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(difference, difference)
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return Interval(difference - half, difference + half)


def dunnett_probability(bound: float, correlation: Correlation, freedom: int) -> float:
    """Return the probability that no statistic of a multivariate t exceeds a bound in magnitude."""
    if not bound:
        return 0.0
    maxima = _normal_maxima(correlation)
    return float(special.chdtrc(freedom, freedom * (maxima / bound) ** 2).mean())


@functools.lru_cache
def dunnett_quantile(confidence: float, correlation: Correlation, freedom: int) -> float:
    """Return the bound that no statistic exceeds in magnitude with this probability."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, correlation, freedom) - confidence

    return float(optimize.root_scalar(excess, bracket=(1e-3, 1e6)).root)


@functools.lru_cache
def _normal_maxima(correlation: Correlation) -> Float[np.ndarray, " N"]:
    """Return quantiles of the largest magnitude among correlated normal numbers.

    A Sobol sequence replaces random numbers, so the result is accurate and deterministic. Means of
    64 neighbors are as accurate as all magnitudes, and faster to use.
    """
    size = len(correlation)
    points = stats.qmc.Sobol(size, scramble=False).random_base2(16)
    # A shift modulo 1 keeps the points off 0, where the normal quantile is infinite.
    points = (points + np.random.default_rng(0).random(size)) % 1
    normal = special.ndtri(points) @ np.linalg.cholesky(np.array(correlation)).T
    return np.sort(np.abs(normal).max(axis=1)).reshape(-1, 64).mean(axis=1)


def verdict(interval: Interval | None, paper: float, margin: float) -> Verdict:
    """Compare a row's difference from the first row with the paper's.

    If the paper's difference is within the margin, the paper claims equivalence, and otherwise a
    sign.

    Args:
        interval: the row's simultaneous interval.
        paper: the paper's difference.
        margin: the largest difference that does not matter.
    """
    if interval is None:
        return "inconclusive"
    low, high = interval if paper > 0 else (-interval.high, -interval.low)
    if abs(paper) > margin:
        is_confirmed, is_refuted = low > 0, high < margin
    else:
        is_confirmed, is_refuted = max(-low, high) < margin, max(low, -high) > margin
    return "as in the paper" if is_confirmed else "differs" if is_refuted else "inconclusive"


def sign_agreement(
    ours: Mapping[str, float | None], paper: Mapping[str, float | None], margin: float
) -> SignAgreement:
    """Count the rows that differ from the first row in the paper's direction.

    Args:
        ours: our difference by row.
        paper: the paper's difference by row. Differences within the margin are left out.
        margin: the largest difference that does not matter.
    """
    pairs = [
        (x, theirs)
        for row, theirs in paper.items()
        if (x := ours.get(row)) is not None and theirs is not None and abs(theirs) > margin
    ]
    same = sum(x * theirs > 0 for x, theirs in pairs)
    return SignAgreement(same, len(pairs), float(stats.binom.sf(same - 1, len(pairs), 0.5)))


def format_p(p: float) -> str:
    """Return a p-value with three decimals; 1,000 samples of a bootstrap resolve no more."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def describe_limits(analysis: Analysis) -> list[str]:
    """Return sentences that name the rows without an interval and the wide rows."""
    base, comparisons = analysis.base, analysis.comparisons
    without = [row for row, comparison in comparisons.items() if comparison.interval is None]
    notes = []
    if len(without) == len(comparisons):
        notes.append(
            f"No row has an interval, because {base} or all other rows have fewer than two seeds. "
            "A difference without an interval proves nothing."
        )
    elif without:
        notes.append(
            f"These rows have fewer than two seeds, so their differences prove nothing: "
            f"{', '.join(without)}."
        )
    if analysis.wide:
        ratios = ", ".join(f"{row} ({ratio:.1f} times)" for row, ratio in analysis.wide.items())
        notes.append(
            f"The standard deviation of these rows is more than {WIDE_RATIO:g} times the typical "
            f"one: {ratios}. It is not pooled with the others, and comparisons with these rows use "
            "Welch's intervals with Bonferroni's correction."
        )
    return notes
