"""Test that the ablation analysis agrees with textbook formulas, SciPy, and simulations.

Dunnett's distribution also agrees with his published table and with a double integral.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from jaxtyping import Float
from scipy import stats

from transformer_jax.reports.seed_statistics import (
    BLEU_MARGIN,
    LOG_PERPLEXITY_MARGIN,
    Analysis,
    Correlation,
    Interval,
    RowComparison,
    Verdict,
    analyze,
    describe_limits,
    deviation_interval,
    dunnett_probability,
    dunnett_quantile,
    failed_seeds,
    format_mean,
    format_p,
    rank_correlation,
    rank_correlation_interval,
    seeds_for_equivalence,
    sign_agreement,
    verdict,
    welch_interval,
)


def to_scores(
    table: Sequence[Sequence[float]] | Float[np.ndarray, "R S"],
) -> dict[str, dict[int, float]]:
    """Return the scores by row (base, 1, 2, ...) and seed (0, 1, ...). NaN marks a missing run."""
    names = ["base", *map(str, range(1, len(table)))]
    return {
        name: {seed: float(x) for seed, x in enumerate(row) if not math.isnan(x)}
        for name, row in zip(names, table, strict=True)
    }


def interval_of(analysis: Analysis, row: str) -> Interval:
    interval = analysis.comparisons[row].interval
    assert interval is not None
    return interval


def excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def p_of(analysis: Analysis, row: str) -> float:
    p = analysis.comparisons[row].p
    assert p is not None
    return p


def test_mean_and_deviation_are_formatted() -> None:
    assert format_mean([5.0, 5.5], 2) == "5.25 ± 0.35"
    assert format_mean([5.0], 1) == "5.0"
    # The huge perplexity of a run that failed to train does not widen a report's tables.
    assert format_mean([1.73e42, 5.0], 2) == "8.65e+41 ± 1.22e+42"


def test_two_rows_give_the_paired_t_test() -> None:
    ours, base = [4.0, 4.3, 4.1, 4.6], [4.2, 4.9, 4.4, 4.7]
    analysis = analyze(to_scores([base, ours]))
    expected = stats.ttest_rel(ours, base)
    assert analysis.comparisons["1"].p == pytest.approx(expected.pvalue, abs=1e-4)
    np.testing.assert_allclose(
        interval_of(analysis, "1"), expected.confidence_interval(), atol=1e-3
    )


def test_a_balanced_table_gives_the_formulas_of_two_way_analysis_of_variance() -> None:
    # The residuals are 1/6 and -1/6 in the first two rows, and -1/3 and 1/3 in the third.
    analysis = analyze(to_scores([[1.0, 2.0], [2.0, 3.0], [3.0, 5.0]]))
    freedom, deviation = (3 - 1) * (2 - 1), math.sqrt(1 / 3 / 2)
    low, high = interval_of(analysis, "2")
    assert analysis.comparisons["2"].difference == pytest.approx((low + high) / 2) == 2.5
    critical = dunnett_quantile(0.95, ((1.0, 0.5), (0.5, 1.0)), freedom)
    assert (high - low) / 2 == pytest.approx(critical * deviation * math.sqrt(1 / 2 + 1 / 2))


def test_an_effect_of_seeds_on_all_rows_does_not_change_the_analysis() -> None:
    table = np.random.default_rng(0).normal(size=(4, 3))
    before, after = (analyze(to_scores(x)) for x in (table, table + np.array([0.0, 50.0, -20.0])))
    assert interval_of(after, "3") == pytest.approx(interval_of(before, "3"))


def test_seeds_of_the_baseline_alone_do_not_change_a_paired_comparison() -> None:
    base, row = [4.2, 4.9, 4.4, 9.0, 1.0], [4.0, 4.3, 4.1, math.nan, math.nan]
    expected = stats.ttest_rel(row[:3], base[:3]).confidence_interval()
    interval = interval_of(analyze(to_scores([base, row])), "1")
    np.testing.assert_allclose(interval, expected, rtol=1e-3)


def null_statistics(
    table: Float[np.ndarray, "N R S"],
) -> tuple[Float[np.ndarray, "N R-1"], Correlation, int]:
    """Return the t statistics of N tables, their correlations, and the degrees of freedom.

    This function fits the same statistical model as `analyze`, but parameterizes it differently.
    NaN marks a missing run.
    """
    rows, seeds = np.nonzero(~np.isnan(table[0]))
    num_rows, num_seeds = table.shape[1:]
    design = np.hstack(
        [np.ones((len(rows), 1)), np.eye(num_rows)[rows, 1:], np.eye(num_seeds)[seeds, 1:]]
    )
    inverse = np.linalg.inv(design.T @ design)
    values = table[:, rows, seeds]
    effects = values @ design @ inverse
    freedom = len(rows) - design.shape[1]
    variance = ((values - effects @ design.T) ** 2).sum(axis=1) / freedom
    covariance = inverse[1:num_rows, 1:num_rows]
    scale = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(scale, scale)
    statistics = effects[:, 1:num_rows] / np.sqrt(variance)[:, None] / scale
    return statistics, tuple(map(tuple, correlation.tolist())), freedom


def draw_tables(seeds_per_row: Sequence[int], count: int) -> Float[np.ndarray, "N R S"]:
    """Draw random tables that have a seed effect but no differences between rows."""
    rng = np.random.default_rng(0)
    shape = (len(seeds_per_row), max(seeds_per_row))
    tables = rng.normal(size=(count, *shape)) + rng.normal(size=(count, 1, shape[1]))
    tables[:, np.arange(shape[1]) >= np.array(seeds_per_row)[:, None]] = math.nan
    return tables


@pytest.mark.parametrize("seeds_per_row", [[3] * 11, [3] * 20, [5, 5, 5, 3, 3, 3, 3, 2], [2, 2, 2]])
def test_rows_that_do_not_differ_are_rarely_significant(seeds_per_row: list[int]) -> None:
    tables = draw_tables(seeds_per_row, count=20_000)
    statistics, correlation, freedom = null_statistics(tables)
    maxima = np.abs(statistics).max(axis=1)
    critical = dunnett_quantile(0.95, correlation, freedom)
    assert np.mean(maxima > critical) == pytest.approx(0.05, abs=0.006)
    # For these tables, `analyze` must give the same results as `null_statistics`.
    for draw in [*np.argsort(maxima)[-5:], *range(5)]:
        analysis = analyze(to_scores(tables[draw]))
        if not analysis.high_variance:
            intervals = [interval_of(analysis, row) for row in analysis.comparisons]
            centers = np.mean(intervals, axis=1)
            halves = np.ptp(intervals, axis=1) / 2
            np.testing.assert_allclose(centers / halves * critical, statistics[draw], rtol=2e-3)
            assert any(map(excludes_zero, intervals)) == (maxima[draw] > critical)


@pytest.mark.parametrize(("num_rows", "error_rate"), [(11, 0.27), (20, 0.39)])
def test_uncorrected_comparisons_would_often_be_significant(
    num_rows: int, error_rate: float
) -> None:
    tables = np.random.default_rng(0).normal(size=(20_000, num_rows, 3))
    pooled = tables.var(axis=2, ddof=1).mean(axis=1)
    means = tables.mean(axis=2)
    largest = np.abs(means[:, 1:] - means[:, :1]).max(axis=1)
    threshold = stats.t.ppf(0.975, 2 * num_rows) * np.sqrt(pooled * 2 / 3)
    assert np.mean(largest > threshold) == pytest.approx(error_rate, abs=0.015)


UNLUCKY = to_scores(
    [
        *([33.3, 33.5, 33.4], [24.9, 25.1, 25.0], [33.2, 33.1, 33.3], [33.0, 33.3, 33.1]),
        [35.8, 18.5, 30.0],
    ]
)


def test_one_unlucky_seed_does_not_widen_the_intervals_of_other_rows() -> None:
    lucky = {row: by_seed for row, by_seed in UNLUCKY.items() if row != "4"}
    before, after = analyze(lucky), analyze(UNLUCKY)
    # The pooled standard deviation does not change. Row 4 takes up 1/4 of the total error rate and
    # leaves 3/4 for rows 1 to 3.
    for row in ("2", "3"):
        assert p_of(after, row) == pytest.approx(p_of(before, row) / (3 / 4))
    for row in ("1", "2", "3"):
        assert after.comparisons[row].welch == before.comparisons[row].welch
        wider = np.ptp(interval_of(after, row)) / np.ptp(interval_of(before, row))
        # Row 4 uses up its share of the error rate, which widens the other intervals slightly.
        assert 1.0 < wider < 1.2
    assert interval_of(after, "1").high < -7.8


def test_a_row_with_an_unlucky_seed_is_named_and_compared_by_its_own_deviation() -> None:
    analysis = analyze(UNLUCKY)
    assert list(analysis.high_variance) == ["4"]
    assert analysis.comparisons["4"].p is None
    low, high = interval_of(analysis, "4")
    assert low < -5.3 < 0 < high
    (note,) = describe_limits(analysis)
    assert "more than 4 times the typical one: 4 (" in note


def test_deviations_that_differ_by_chance_are_pooled() -> None:
    tables = draw_tables([3] * 11, count=500)
    deviations = tables.std(axis=2, ddof=1)
    # The largest of 11 standard deviations is usually more than 4 times as large as the smallest.
    assert np.mean(deviations.max(axis=1) > 4 * deviations.min(axis=1)) > 0.5
    assert sum(bool(analyze(to_scores(table)).high_variance) for table in tables[:50]) <= 1


def test_welchs_interval_is_scipys() -> None:
    ours, base = [4.0, 4.3, 4.1], [4.2, 4.9, 4.4, 5.7]
    expected = stats.ttest_ind(ours, base, equal_var=False).confidence_interval(0.9)
    assert welch_interval(ours, base, 0.9) == pytest.approx(tuple(expected))


def test_one_seed_gives_differences_without_intervals() -> None:
    analysis = analyze(to_scores([[1.0], [1.5]]))
    comparison = analysis.comparisons["1"]
    assert comparison.difference == 0.5
    assert (comparison.interval, comparison.p, comparison.welch) == (None, None, None)
    (note,) = describe_limits(analysis)
    assert note.startswith("No row has an interval")


def test_a_row_with_one_seed_is_named() -> None:
    nan = math.nan
    analysis = analyze(to_scores([[1.0, 1.2, 1.4], [1.5, 1.9, 1.8], [1.5, nan, nan], [nan] * 3]))
    assert analysis.comparisons["1"].interval is not None
    assert analysis.comparisons["2"].difference is not None
    assert analysis.comparisons["2"].interval is None
    assert analysis.comparisons["3"].difference is None
    (note,) = describe_limits(analysis)
    assert note.endswith("prove nothing: 2, 3.")


def test_the_difference_of_a_row_with_one_seed_is_adjusted_for_the_seed() -> None:
    nan = math.nan
    base, other = [1.0, 1.2, 1.7], [1.5, 1.7, 2.2]
    for table in ([base, other, [nan, nan, 2.0]], [base, [nan, nan, 2.0]], [[nan, nan, 1.7], base]):
        comparison = analyze(to_scores(table)).comparisons[str(len(table) - 1)]
        assert comparison.difference == pytest.approx(table[-1][2] - table[0][2])
        assert (comparison.interval, comparison.p) == (None, None)
    without = analyze(to_scores([base, other])).comparisons["1"]
    assert analyze(to_scores([base, other, [nan, nan, 2.0]])).comparisons["1"] == without


def test_without_comparable_rows_no_row_is_said_to_lack_an_interval() -> None:
    assert describe_limits(analyze(to_scores([[1.0, 1.2]]))) == []


def test_rows_without_common_seeds_are_compared_by_welchs_interval() -> None:
    analysis = analyze({"base": {0: 1.0, 1: 1.1, 2: 0.9}, "other": {3: 2.0, 4: 2.2, 5: 2.4}})
    comparison = analysis.comparisons["other"]
    expected = welch_interval([2.0, 2.2, 2.4], [1.0, 1.1, 0.9])
    assert expected is not None
    assert comparison.interval == comparison.welch == expected


def test_two_seeds_have_no_welch_interval() -> None:
    # With two scores in each row, the interval would be [-49, +53].
    ours, theirs = [2.0, 10.0], [4.0, 4.1]
    low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    assert high - low > 100
    assert welch_interval(ours, theirs) is None
    analysis = analyze(to_scores([theirs, ours, [4.1, 4.0], [4.0, 4.2], [4.1, 4.3]]))
    assert list(analysis.high_variance) == ["1"]
    assert analysis.comparisons["1"].difference == pytest.approx(1.95)
    assert analysis.comparisons["1"].interval is None
    assert analysis.comparisons["2"].interval is not None


def test_one_degree_of_freedom_gives_no_simultaneous_interval() -> None:
    nan = math.nan
    base, ours = [30.0, 31.0, 30.2], [28.0, 20.0, 27.9]
    # The interval would extend from -63.7 to +50.7.
    for table in ([base[:2], ours[:2]], [base, [*ours[:2], nan]]):
        analysis = analyze(to_scores(table))
        comparison = analysis.comparisons["1"]
        # The difference is adjusted for the missing seed.
        assert comparison.difference == pytest.approx(-6.5)
        assert (comparison.interval, comparison.p) == (None, None)
        assert (analysis.deviation, analysis.freedom) == (None, 1)
        [note] = describe_limits(analysis)
        assert "if the pooled rows have fewer than 2 degrees of freedom" in note
    # Three seeds in both rows are enough for Welch's interval, even if only two are shared.
    partly = analyze({"base": dict(enumerate(base)), "other": {0: 28.0, 1: 20.0, 3: 27.9}})
    assert partly.freedom == 1
    assert partly.comparisons["other"].interval == partly.comparisons["other"].welch is not None
    # Two degrees of freedom are enough.
    assert analyze(to_scores([base, ours])).comparisons["1"].interval is not None
    assert analyze(to_scores([base[:2], ours[:2], ours[:2]])).comparisons["1"].interval is not None


def test_equal_scores_are_not_significant() -> None:
    analysis = analyze(to_scores([[0.1, 0.3], [0.1, 0.3], [1.1, 1.3]]))
    assert not excludes_zero(interval_of(analysis, "1"))
    assert excludes_zero(interval_of(analysis, "2"))
    assert [comparison.p for comparison in analysis.comparisons.values()] == [1.0, 0.0]


def test_a_run_failed_to_train_if_a_unigram_model_is_better() -> None:
    perplexities = {0: 5.1, 1: 400.0, 2: math.nan, 3: math.inf}
    assert failed_seeds(perplexities, unigram=300.0) == [1, 2, 3]
    assert failed_seeds(perplexities, unigram=None) == [2, 3]


@pytest.mark.parametrize(
    ("interval", "paper", "expected"),
    [
        # The difference in the paper exceeds the margin, so only its sign matters.
        ((0.5, 2.0), 1.0, "as in the paper"),
        ((-2.0, -0.5), -1.0, "as in the paper"),
        ((0.01, 0.05), 1.0, "as in the paper"),
        ((-2.0, -0.5), 1.0, "differs"),
        ((0.5, 2.0), -1.0, "differs"),
        ((-0.05, 0.05), 1.0, "differs"),
        ((-0.05, 0.5), 1.0, "inconclusive"),
        ((-0.5, 0.05), -1.0, "inconclusive"),
        # The difference in the paper is within the margin, so the paper claims equivalence.
        ((-0.05, 0.09), 0.0, "as in the paper"),
        ((0.01, 0.09), -0.1, "as in the paper"),
        ((-0.05, 0.14), 0.0, "inconclusive"),
        # An interval that is wider than twice the margin cannot show equivalence.
        ((-0.05, 0.2), 0.0, "out of reach"),
        ((-0.1, 0.1), 0.0, "out of reach"),
        ((0.15, 0.9), 0.0, "differs"),
        ((0.05, 0.2), 0.1, "inconclusive"),
        ((0.11, 0.2), 0.1, "differs"),
        ((-0.2, -0.11), 0.0, "differs"),
    ],
)
def test_the_verdict_follows_from_the_interval(
    interval: tuple[float, float], paper: float, expected: Verdict
) -> None:
    assert verdict(Interval(*interval), paper, margin=0.1) == expected


def test_without_an_interval_the_verdict_is_inconclusive() -> None:
    assert verdict(None, 1.0, margin=0.1) == "inconclusive"


def test_without_variance_the_verdict_is_inconclusive() -> None:
    # If all models get 0 BLEU, the scores say nothing about the models.
    for difference, paper in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        interval = Interval(difference, difference)
        assert verdict(interval, paper, margin=0.1) == "inconclusive"


def test_margins_separate_the_rows_that_the_paper_calls_worse_from_those_it_calls_identical() -> (
    None
):
    # In Table 3, rows A4 and B2 have the same perplexity and BLEU, which are worse than those of
    # the base row. Row E has nearly the same scores as the base row.
    worse, identical = (math.log(5.01 / 4.92), 25.4 - 25.8), (0.0, 25.7 - 25.8)
    for margin, large, small in zip(
        (LOG_PERPLEXITY_MARGIN, BLEU_MARGIN), worse, identical, strict=True
    ):
        assert abs(small) < margin < abs(large)
        assert margin == pytest.approx(abs(large) / 2, rel=0.15)


@pytest.mark.parametrize(("size", "margin"), [(1, 0.8), (3, 0.5), (12, 1.0)])
def test_the_number_of_seeds_for_equivalence_is_the_first_that_suffices(
    size: int, margin: float
) -> None:
    def half_width(seeds: int) -> float:
        # Use SciPy's exact quantile for one comparison, and Dunnett's for several.
        freedom = size * (seeds - 1)
        critical = dunnett_quantile(0.95, equal_correlations(size), freedom)
        if size == 1:
            critical = float(stats.t.ppf(0.975, freedom))
        return critical * math.sqrt(2 / seeds)

    seeds = seeds_for_equivalence(1.0, size, margin)
    assert half_width(seeds) < margin <= half_width(seeds - 1)
    # Only the ratio of the margin to the deviation matters.
    assert seeds_for_equivalence(0.01, size, margin / 100) == seeds
    # With one seed, there is no interval.
    assert seeds_for_equivalence(1e-6, size, margin) == 2


def test_equivalence_needs_as_many_seeds_as_the_documentation_says() -> None:
    # The pooled deviations of the 5,000-step report, in ln perplexity and dev BLEU.
    assert seeds_for_equivalence(0.0109, 13, LOG_PERPLEXITY_MARGIN) == pytest.approx(19, abs=1)
    assert seeds_for_equivalence(0.56, 13, BLEU_MARGIN) == pytest.approx(124, abs=2)
    # The pooled deviation in perplexity has 40 degrees of freedom.
    low, high = (
        seeds_for_equivalence(x, 13, LOG_PERPLEXITY_MARGIN) for x in deviation_interval(0.0109, 40)
    )
    assert (low, high) == (13, 31)


def test_the_interval_of_a_deviation_contains_it_in_95_percent_of_samples() -> None:
    table = np.random.default_rng(0).normal(scale=3.0, size=(20_000, 5))
    intervals = [deviation_interval(x, 4) for x in table.std(axis=1, ddof=1).tolist()]
    assert np.mean([low > 3 for low, _ in intervals]) == pytest.approx(0.025, abs=0.004)
    assert np.mean([high < 3 for _, high in intervals]) == pytest.approx(0.025, abs=0.004)


def test_the_rank_correlation_is_pearsons_correlation_of_ranks() -> None:
    rng = np.random.default_rng(0)
    ours, paper = rng.normal(size=(2, 13))
    ranks = [np.argsort(np.argsort(x)) for x in (ours, paper)]
    found = rank_correlation(list(zip(ours.tolist(), paper.tolist(), strict=True)))
    assert found is not None
    assert found[0] == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    # For half of all permutations, the absolute correlation is at least as large as the one whose
    # p-value is 0.5.
    draws = [abs(np.corrcoef(rng.permutation(13), ranks[1])[0, 1]) for _ in range(20_000)]
    assert found[1] == pytest.approx(np.mean(np.array(draws) >= abs(found[0])), abs=0.02)
    # Two of the six orders of three ranks have a correlation of 1 or -1.
    assert rank_correlation([(1.0, 2.0), (2.0, 3.0), (3.0, 9.0)]) == pytest.approx((1, 1 / 3))
    assert rank_correlation([(1.0, 2.0), (1.0, 3.0), (3.0, 9.0)]) == pytest.approx(
        (0.75**0.5, 2 / 3)
    )
    assert rank_correlation([(1.0, 1.0), (2.0, 2.0)]) is None
    assert rank_correlation([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]) is None
    assert rank_correlation([]) is None


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_interval_of_a_rank_correlation_has_its_confidence(correlation: float) -> None:
    rng = np.random.default_rng(0)
    # Spearman's correlation of normal variables with Pearson's correlation r.
    true = 6 / np.pi * np.arcsin(correlation / 2)
    covered = []
    for _ in range(4000):
        x, noise = rng.normal(size=(2, 18))
        y = correlation * x + (1 - correlation**2) ** 0.5 * noise
        interval = rank_correlation_interval(float(stats.spearmanr(x, y).statistic), 18)
        assert interval is not None
        covered.append(interval.low <= true <= interval.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


def test_few_or_equal_ranks_have_no_interval() -> None:
    assert rank_correlation_interval(0.2, 9) is None
    assert rank_correlation_interval(1.0, 18) is None
    assert rank_correlation_interval(-1.0, 18) is None


def test_equal_signs_are_counted_among_the_rows_for_which_the_paper_makes_a_claim() -> None:
    pairs = [(1.0, 2.0), (3.0, 1.0), (-1.0, -2.0), (-1.0, 2.0), (1.0, 0.05)]
    assert sign_agreement(pairs, margin=0.1, lower_is_better=True) == (3, 3, 4)
    assert sign_agreement(pairs, margin=0.1, lower_is_better=False) == (3, 1, 4)
    assert sign_agreement(pairs[-1:], margin=0.1, lower_is_better=True) == (0, 0, 0)


def test_a_difference_is_unconfirmed_if_only_the_simultaneous_interval_excludes_zero() -> None:
    # Base varies more than the other rows, so only Welch's interval is wide.
    rng = np.random.default_rng(0)
    scores = {"base": {0: 0.0, 1: 0.3, 2: -0.3}}
    scores |= {f"row{row}": dict(enumerate(0.5 + rng.normal(0, 0.1, 3))) for row in range(8)}
    analysis = analyze(scores)
    assert all(x.is_unconfirmed for x in analysis.comparisons.values())
    far = {row: {k: v + 9 * (row != "base") for k, v in x.items()} for row, x in scores.items()}
    assert not any(x.is_unconfirmed for x in analyze(far).comparisons.values())
    assert RowComparison(1.0, Interval(0.5, 1.5), None).is_unconfirmed
    assert not RowComparison(1.0, Interval(-0.5, 1.5), None).is_unconfirmed
    assert not RowComparison(1.0, None, None).is_unconfirmed


def test_the_width_of_an_interval_follows_from_the_reported_dispersion() -> None:
    rng = np.random.default_rng(0)
    scores = {row: dict(enumerate(rng.normal(size=4))) for row in ("base", "a", "b")}
    analysis = analyze(scores)
    assert analysis.freedom == 6
    assert analysis.deviation is not None
    interval = analysis.comparisons["a"].interval
    assert interval is not None
    half = analysis.critical * analysis.deviation * math.sqrt(2 / 4)
    assert (interval.high - interval.low) / 2 == pytest.approx(half)


def test_p_values_end_at_the_resolution_of_the_test() -> None:
    assert [format_p(p) for p in (1 / 1001, 2 / 1001, 0.0, 0.5)] == [
        *("< 0.001", "0.002", "< 0.001", "0.500")
    ]


def test_a_high_variance_row_among_rows_that_do_not_vary_has_no_ratio() -> None:
    equal, varying = dict.fromkeys(range(3), 1.0), {0: 1.0, 1: 2.0, 2: 3.0}
    [note] = describe_limits(analyze({"base": equal, "same": equal, "wide": varying}))
    assert "wide (the typical one is 0)" in note


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
