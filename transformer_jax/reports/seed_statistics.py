"""Compare an ablation's rows across random seeds, as docs/statistics.md describes.

Each score belongs to a row and a seed, and the first row is the baseline. Perplexities are compared
by their logarithms, because a difference of 1 is large at perplexity 5 but small at 30.
"""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special, stats

CONFIDENCE = 0.95
# A difference matters only if it exceeds its margin, which is half the smallest difference that the
# paper interprets.
LOG_PERPLEXITY_MARGIN = 0.01
BLEU_MARGIN = 0.2
# The standard deviation of a high-variance row exceeds this multiple of the typical one.
HIGH_VARIANCE_RATIO = 4.0
# If rows have only two seeds, Welch's interval has very few degrees of freedom and can span
# thousands of BLEU points.
MIN_WELCH_SEEDS = 3
# With one degree of freedom, a simultaneous interval can be equally wide. Welch's interval then has
# at least two degrees of freedom.
MIN_FREEDOM = 2

# With more ranks, the t approximation of a rank correlation's p-value is accurate enough.
MAX_EXACT_RANKS = 8
# With fewer ranks, the normal approximation of a rank correlation's interval is poor.
MIN_RANKS = 10

SEEDS_RULE = (
    " (or three, if the row or the first row is not pooled, or if the pooled rows have fewer than "
    f"{MIN_FREEDOM} degrees of freedom)"
)

Scores = Mapping[str, Mapping[int, float]]
Verdict = Literal["as in the paper", "differs", "inconclusive", "out of reach"]


class Interval(NamedTuple):
    """A confidence interval for a difference."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether all differences in the interval have the same sign."""
        return self.low > 0 or self.high < 0

    @property
    def is_point(self) -> bool:
        """Whether the interval has no width, because the scores do not vary between seeds."""
        return math.isclose(self.low, self.high, abs_tol=1e-9)

    def is_within(self, margin: float) -> bool:
        """Return whether the absolute values of all differences are below `margin`."""
        return max(-self.low, self.high) < margin


@dataclass(frozen=True)
class RowComparison:
    """A row's score minus the score of the table's first row, or another contrast of rows."""

    difference: float | None
    """The estimate, which is the center of `interval`, or None if a row has no score."""
    interval: Interval | None
    """The simultaneous 95% interval, or None if a compared row has fewer than two seeds (three if
    one is a high-variance row, or if there are too few degrees of freedom)."""
    welch: Interval | None
    """Welch's 95% interval for these rows alone, not corrected for multiple comparisons."""
    p: float | None = None
    """The p-value that agrees with `interval`, or None if `interval` is None or is a
    Bonferroni-corrected Welch interval."""

    @property
    def is_significant(self) -> bool:
        """Whether `interval` excludes 0."""
        return self.interval is not None and self.interval.excludes_zero

    @property
    def is_unconfirmed(self) -> bool:
        """Whether `interval` excludes 0, but `welch` contains it or is missing."""
        if not self.is_significant:
            return False
        return self.welch is None or not self.welch.excludes_zero


@dataclass(frozen=True)
class Analysis:
    """The comparisons of the other rows with the first row."""

    base: str
    comparisons: Mapping[str, RowComparison]
    high_variance: Mapping[str, float]
    """The standard deviations of rows that are not pooled with others, relative to the typical
    one."""
    deviation: float | None = None
    """The pooled standard deviation between seeds, or None if fewer than `MIN_FREEDOM` degrees of
    freedom remain."""
    freedom: int = 0
    """The degrees of freedom of `deviation`."""
    critical: float = math.nan
    """The critical value of the simultaneous intervals of pooled rows, if there are any."""


def failed_seeds(perplexities: Mapping[int, float], unigram: float | None) -> list[int]:
    """Return the seeds whose perplexity is not finite or exceeds a unigram model's, if known."""
    limit = math.inf if unigram is None else unigram
    return [seed for seed, x in perplexities.items() if not (math.isfinite(x) and x <= limit)]


def analyze(scores: Scores, confidence: float = CONFIDENCE) -> Analysis:
    """Compare every row with the first row. Rows may have different seeds.

    `confidence` applies to the simultaneous intervals. If several analyses form one family, it must
    be higher than that of the whole family.
    """
    base, *others = scores
    repeated = {row: by_seed for row, by_seed in scores.items() if len(by_seed) > 1}
    high_variance = find_high_variance(repeated)
    num_compared = max(1, len(repeated) - 1)
    comparisons = {}
    for row in others:
        ours, theirs = list(scores[row].values()), list(scores[base].values())
        comparisons[row] = RowComparison(
            statistics.fmean(ours) - statistics.fmean(theirs) if ours and theirs else None,
            welch_interval(ours, theirs, 1 - (1 - confidence) / num_compared),
            welch_interval(ours, theirs),
        )
    pooled = {row: x for row, x in scores.items() if x and row not in high_variance}
    estimates, deviation, freedom, critical = _compare_pooled(
        pooled, base, num_compared, confidence
    )
    for row, (difference, interval, p) in estimates.items():
        comparisons[row] = replace(comparisons[row], difference=difference, interval=interval, p=p)
    return Analysis(base, comparisons, high_variance, deviation, freedom, critical)


def find_high_variance(scores: Scores) -> dict[str, float]:
    """Return the standard deviation of each high-variance row, divided by the typical one.

    Each row of `scores` has at least two seeds.
    """
    # The median of a sample variance is below the true variance. Dividing by the median of the
    # chi-squared distribution, divided by its degrees of freedom, corrects for this.
    variances = [
        statistics.variance(by_seed.values()) / special.chdtri(n := len(by_seed) - 1, 0.5) * n
        for by_seed in scores.values()
    ]
    typical = math.sqrt(statistics.median(variances)) if variances else 0.0
    deviations = {row: statistics.stdev(by_seed.values()) for row, by_seed in scores.items()}
    return {
        row: deviation / typical if typical else math.inf
        for row, deviation in deviations.items()
        if deviation > HIGH_VARIANCE_RATIO * typical
    }


def _compare_pooled(
    scores: Scores, base: str, num_compared: int, confidence: float
) -> tuple[dict[str, tuple[float, Interval | None, float | None]], float | None, int, float]:
    """Model scores as row effect + seed effect + error; compare the rows with Dunnett's method.

    `scores` contains rows with one seed or similar standard deviations, perhaps without `base`.
    With probability `confidence`, the intervals of `num_compared` rows, some of which may be
    missing, contain the true differences. Return the estimate, interval, and p-value of each row
    that shares seeds with the first row, directly or through others, the pooled standard deviation,
    its degrees of freedom, and the critical value. Values that one seed or too few degrees of
    freedom leave unknown are None, NaN, or missing.
    """
    others = [row for row in scores if row != base]
    seeds = sorted({seed for by_seed in scores.values() for seed in by_seed})
    cells = [(row, seed) for row, by_seed in scores.items() for seed in by_seed]
    if base not in scores or not others:
        return {}, None, 0, math.nan
    design = np.array(
        [[row == x for x in others] + [seed == x for x in seeds] for row, seed in cells], float
    )
    values = np.array([scores[row][seed] for row, seed in cells])
    inverse = np.linalg.pinv(design)
    freedom = len(cells) - int(np.linalg.matrix_rank(design))
    # The data determine an effect if its unit vector is in the row space of the design matrix.
    connected = np.flatnonzero(np.isclose(np.diag(inverse @ design)[: len(others)], 1.0))
    # Remove floating-point noise, which would matter if all differences were equal.
    effects = (inverse @ values).round(12)
    num_seeds = [min(len(scores[base]), len(scores[row])) for row in others]
    # If there are too few degrees of freedom, rows with at least this many seeds keep Welch's
    # interval.
    min_seeds = 2 if freedom >= MIN_FREEDOM else MIN_WELCH_SEEDS
    estimates: dict[str, tuple[float, Interval | None, float | None]] = {
        others[k]: (float(effects[k]), None, None) for k in connected if num_seeds[k] < min_seeds
    }
    repeated = [k for k in connected if num_seeds[k] >= min_seeds]
    if freedom < MIN_FREEDOM or not repeated:
        return estimates, None, freedom, math.nan
    deviation = round(math.sqrt(np.sum((values - design @ inverse @ values) ** 2) / freedom), 12)
    covariance = (inverse @ inverse.T)[np.ix_(repeated, repeated)]
    differences, share = effects[repeated].tolist(), len(repeated) / num_compared
    found, critical = simultaneous_intervals(
        differences, covariance, deviation, freedom, share, confidence
    )
    for k, difference, (interval, p) in zip(repeated, differences, found, strict=True):
        estimates[others[k]] = difference, interval, p
    return estimates, deviation, freedom, critical


def simultaneous_intervals(
    differences: Sequence[float],
    covariance: Float[np.ndarray, "K K"],
    deviation: float,
    freedom: int,
    share: float = 1.0,
    confidence: float = CONFIDENCE,
) -> tuple[list[tuple[Interval, float]], float]:
    """Return the simultaneous interval and the p-value of each difference, and the critical value.

    The covariance of the differences is `deviation`² times `covariance`. `share` is the part of the
    error rate, 1 - `confidence`, that these differences may use.
    """
    scale = np.sqrt(np.diag(covariance))
    correlation = tuple(map(tuple, (covariance / np.outer(scale, scale)).round(12).tolist()))
    critical = dunnett_quantile(1 - (1 - confidence) * share, correlation, freedom)
    found = []
    for difference, error in zip(differences, (deviation * scale).tolist(), strict=True):
        interval = Interval(difference - critical * error, difference + critical * error)
        statistic = abs(difference) / error if error else math.inf if difference else 0.0
        p = (1 - dunnett_probability(statistic, correlation, freedom)) / share
        found.append((interval, min(1.0, p)))
    return found, critical


def welch_interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Return Welch's interval for a mean difference; None if a row has fewer than three scores."""
    if min(len(ours), len(theirs)) < MIN_WELCH_SEEDS:
        return None
    return welch_contrast([ours, theirs], [1.0, -1.0], confidence)


def welch_contrast(
    samples: Sequence[Sequence[float]], weights: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Return the interval for a weighted sum of means of samples with unequal variances.

    Each sample has at least two scores. The degrees of freedom are those of Satterthwaite (1946).
    For the difference between two means, the interval is Welch's.
    """
    estimate = sum(w * statistics.fmean(x) for w, x in zip(weights, samples, strict=True))
    parts = [
        (w**2 * statistics.variance(x) / len(x), len(x) - 1)
        for w, x in zip(weights, samples, strict=True)
        if w
    ]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(estimate, estimate)
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    half = float(special.stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return Interval(estimate - half, estimate + half)


def verdict(interval: Interval | None, paper: float, margin: float) -> Verdict:
    """Compare a row's difference from the first row with the same difference in the paper.

    If the paper's difference is within the margin, test for equivalence. Otherwise, test the sign.
    Equivalence is "out of reach" if the interval is at least twice as wide as the margin and is not
    entirely outside ± `margin`. Without an `interval`, the verdict is "inconclusive". The same
    applies if all seeds have the same score, such as 0 BLEU, so that their deviation is unknown.
    """
    if interval is None or interval.is_point:
        return "inconclusive"
    low, high = interval if paper > 0 else (-interval.high, -interval.low)
    if abs(paper) > margin:
        is_confirmed, is_refuted = low > 0, high < margin
    else:
        is_confirmed, is_refuted = interval.is_within(margin), max(low, -high) > margin
        if not is_refuted and high - low >= 2 * margin:
            return "out of reach"
    return "as in the paper" if is_confirmed else "differs" if is_refuted else "inconclusive"


def sign_agreement(
    differences: Sequence[tuple[float, float]], margin: float, *, lower_is_better: bool
) -> tuple[int, int, int]:
    """Compare the signs of our differences from the first row with the signs of the paper's.

    Returns:
        The number of equal signs, and the number of rows that are worse than the first row in the
        paper, both among the rows whose difference in the paper exceeds the margin, and the number
        of these rows.
    """
    pairs = [(ours, paper) for ours, paper in differences if abs(paper) > margin]
    agrees = sum(ours * paper > 0 for ours, paper in pairs)
    return agrees, sum((paper > 0) == lower_is_better for _, paper in pairs), len(pairs)


def seeds_for_equivalence(deviation: float, num_compared: int, margin: float) -> int:
    """Return how many seeds in each row are necessary to show that two rows are equivalent.

    From this number on, the interval of a row without any observed difference is within `margin`,
    the largest negligible difference. The pooled `deviation` between seeds must not be zero.
    """
    correlation = tuple(map(tuple, (0.5 + 0.5 * np.eye(num_compared)).tolist()))

    def is_enough(seeds: int) -> bool:
        critical = dunnett_quantile(CONFIDENCE, correlation, num_compared * (seeds - 1))
        return critical * deviation * math.sqrt(2 / seeds) < margin

    low, high = 2, 2
    while not is_enough(high):
        low, high = high, 2 * high
    return low + bisect.bisect_left(range(low, high), True, key=is_enough)


def deviation_interval(deviation: float, freedom: int) -> Interval:
    """Return the 95% interval of a standard deviation with this many degrees of freedom."""
    tails = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    low, high = (deviation * math.sqrt(freedom / special.chdtri(freedom, x)) for x in tails)
    return Interval(low, high)


def rank_correlation(differences: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return Spearman's correlation between our differences and the paper's, and its p-value.

    With at most `MAX_EXACT_RANKS` differences, the p-value is the share of all permutations whose
    absolute correlation is at least as large, because SciPy's approximation is too small. Return
    None if there are fewer than three differences, or if either side does not vary.
    """
    sides = list(zip(*differences, strict=True))
    if len(differences) < 3 or min(len(set(side)) for side in sides) < 2:
        return None
    result = stats.spearmanr(*sides)
    correlation, p = float(result.statistic), float(result.pvalue)
    if len(differences) <= MAX_EXACT_RANKS:
        first, second = (stats.rankdata(side) - (len(side) + 1) / 2 for side in sides)
        products = np.array(list(itertools.permutations(first))) @ second
        p = float(np.mean(np.abs(products) >= abs(first @ second) - 1e-9))
    return correlation, p


def rank_correlation_interval(correlation: float, count: int) -> Interval | None:
    """Return the 95% interval of Spearman's correlation of `count` pairs (Bonett & Wright, 2000).

    Return None if there are fewer than `MIN_RANKS` pairs, for which the approximation is poor, or
    if the ranks are equal or opposite.
    """
    if count < MIN_RANKS or abs(correlation) > 1 - 1e-9:
        return None
    error = math.sqrt((1 + correlation**2 / 2) / (count - 3))
    reach = float(special.ndtri((1 + CONFIDENCE) / 2)) * error
    center = math.atanh(correlation)
    return Interval(math.tanh(center - reach), math.tanh(center + reach))


def format_mean(values: Collection[float], digits: int) -> str:
    """Format a score's mean over seeds and, if there are several seeds, its standard deviation."""
    numbers = [statistics.fmean(values)]
    if len(values) > 1:
        numbers.append(statistics.stdev(values))
    return " ± ".join(format_score(number, digits) for number in numbers)


def format_score(value: float, digits: int) -> str:
    """Format a score. The perplexity of a run that failed to train can be enormous."""
    return f"{value:.{digits}{'f' if value < 1e6 else 'e'}}"


def format_p(p: float) -> str:
    """Format a p-value to three decimal places, the resolution of a test with 1,000 samples."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def describe_limits(analysis: Analysis) -> list[str]:
    """Return notes that list the high-variance rows and the rows without an interval."""
    without = [row for row, x in analysis.comparisons.items() if x.interval is None]
    notes = []
    if without and len(without) == len(analysis.comparisons):
        notes.append(
            f"No row has an interval, because {analysis.base} or all other rows have fewer than "
            f"two seeds{SEEDS_RULE}. A difference without an interval proves nothing."
        )
    elif without:
        names = ", ".join(without)
        notes.append(
            f"Rows with fewer than two seeds{SEEDS_RULE}, whose differences prove nothing: {names}."
        )
    if analysis.high_variance:
        ratios = ", ".join(
            f"{row} ({f'{ratio:.1f} times' if math.isfinite(ratio) else 'the typical one is 0'})"
            for row, ratio in analysis.high_variance.items()
        )
        notes.append(
            f"These rows have a standard deviation more than {HIGH_VARIANCE_RATIO:g} times the "
            f"typical one: {ratios}. They are not pooled with the others, and comparisons with "
            "them use Welch's intervals with Bonferroni correction, without adjustment for seeds."
        )
    return notes


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


def _square_root(correlation: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    """Return a matrix whose product with its transpose is the matrix, which can be singular."""
    values, vectors = np.linalg.eigh(correlation)
    if values.min() > 1e-9:
        return np.linalg.cholesky(correlation)
    return vectors * np.sqrt(values.clip(0.0))


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
    normal = special.ndtri(points) @ _square_root(np.array(correlation)).T
    return np.sort(np.abs(normal).max(axis=1)).reshape(-1, 64).mean(axis=1)
