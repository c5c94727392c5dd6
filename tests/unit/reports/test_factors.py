"""Test that the effects of fields agree with a regression, textbook formulas, and simulations."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from example_configs import SMALL
from run_files import collect, set_status, write_results
from scipy import stats

from transformer_jax.config import Config, ModelConfig, Row
from transformer_jax.reports.answers import answer_factors
from transformer_jax.reports.factors import Contrast, analyze_factors, find_factors
from transformer_jax.reports.report import write_report
from transformer_jax.reports.results import Results
from transformer_jax.reports.seed_statistics import Interval, analyze
from transformer_jax.sweeps.plan import plan_sweep

HEADS, SIZES = (1, 2, 4), (4, 8)


def make_configs(
    heads: tuple[int, ...] = HEADS, sizes: tuple[int, ...] = SIZES
) -> dict[str, Config]:
    return {
        f"h{h}-k{k}": SMALL.change(model={"num_heads": h, "d_k": k})
        for h, k in itertools.product(heads, sizes)
    }


def draw_scores(configs: dict[str, Config], seeds: int = 4) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(0)
    shift = rng.normal(size=seeds)
    return {x: dict(enumerate((rng.normal(size=seeds) + shift).tolist())) for x in configs}


def by_kind(contrasts: list[Contrast], kind: str) -> dict[str, Contrast]:
    return {x.name: x for x in contrasts if x.kind == kind}


def limits(contrast: Contrast) -> Interval:
    assert contrast.comparison.interval is not None
    return contrast.comparison.interval


def test_fields_are_factors_if_the_rows_are_all_combinations() -> None:
    configs = make_configs()
    assert find_factors(configs) == {"model.d_k": [4, 8], "model.num_heads": [1, 2, 4]}
    # Rows do not form a grid if a combination is missing or repeated, or if only one field varies.
    assert find_factors(dict(list(configs.items())[:-1])) is None
    assert find_factors({**configs, "again": configs["h1-k4"]}) is None
    assert find_factors(make_configs(sizes=(4,))) is None
    # The seed does not count as a field.
    seeded = {x: c.change(train={"seed": i}) for i, (x, c) in enumerate(configs.items())}
    assert find_factors(seeded) == find_factors(configs)


def test_effects_are_those_of_a_regression_with_dummy_variables() -> None:
    configs = make_configs(heads=(1, 2))
    scores, factors = draw_scores(configs), find_factors(configs)
    assert factors is not None
    contrasts = analyze_factors(scores, configs, factors)
    # The regression has an intercept, both fields, their product, and seeds. Deviation coding
    # makes the coefficients of the fields main effects.
    lines = [(h, k, seed) for h, k in itertools.product((1, 2), SIZES) for seed in range(4)]
    design = np.array(
        [
            [1.0, h - 1.5, (k - 6) / 4, (h - 1.5) * (k - 6) / 4, *(seed == s for s in range(1, 4))]
            for h, k, seed in lines
        ]
    )
    values = np.array([scores[f"h{h}-k{k}"][seed] for h, k, seed in lines])
    solution, residual, *_ = np.linalg.lstsq(design, values)
    freedom = len(lines) - design.shape[1]
    covariance = residual[0] / freedom * np.linalg.inv(design.T @ design)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(np.diag(covariance))
    [interaction] = by_kind(contrasts, "interaction").values()
    assert interaction.comparison.difference == pytest.approx(solution[3])
    low, high = limits(interaction)
    # With only one interaction, the interval and the p-value are those of Student's t.
    assert (high - low) / 2 == pytest.approx(half[3], rel=2e-3)
    t = abs(solution[3]) / np.sqrt(covariance[3, 3])
    assert interaction.comparison.p == pytest.approx(2 * stats.t.sf(t, freedom), abs=2e-3)
    main = by_kind(contrasts, "main effect")
    assert main["num_heads 2 - 1"].comparison.difference == pytest.approx(solution[1])
    assert main["d_k 8 - 4"].comparison.difference == pytest.approx(solution[2])
    # The intervals for two main effects are wider than the interval for one, but not wider than
    # Bonferroni's intervals.
    low, high = limits(main["d_k 8 - 4"])
    bonferroni = half[2] * stats.t.ppf(1 - 0.025 / 2, freedom) / stats.t.ppf(0.975, freedom)
    assert half[2] < (high - low) / 2 < bonferroni * 1.001


def test_a_matched_contrast_compares_two_rows() -> None:
    configs = make_configs()
    scores, factors = draw_scores(configs), find_factors(configs)
    assert factors is not None
    matched = by_kind(analyze_factors(scores, configs, factors), "matched contrast")
    assert len(matched) == 2 * 2 + 3
    mean = {row: float(np.mean(list(x.values()))) for row, x in scores.items()}
    assert matched["num_heads 4 - 1 at d_k 8"].comparison.difference == pytest.approx(
        mean["h4-k8"] - mean["h1-k8"]
    )
    assert matched["d_k 8 - 4 at num_heads 2"].comparison.difference == pytest.approx(
        mean["h2-k8"] - mean["h2-k4"]
    )


def test_an_interaction_is_a_difference_between_matched_contrasts() -> None:
    configs = make_configs()
    scores, factors = draw_scores(configs), find_factors(configs)
    assert factors is not None
    contrasts = analyze_factors(scores, configs, factors)
    matched = by_kind(contrasts, "matched contrast")
    interactions = by_kind(contrasts, "interaction")
    assert len(interactions) == 2
    found = interactions["(d_k 8 - 4) x (num_heads 4 - 1)"].comparison.difference
    large, small = (matched[f"d_k 8 - 4 at num_heads {x}"].comparison.difference for x in (4, 1))
    assert None not in (found, large, small)
    assert found == pytest.approx((large or 0) - (small or 0))


def test_additive_fields_have_no_interaction_whatever_the_seeds_do() -> None:
    configs = make_configs()
    scores = {
        row: {s: 10.0 * c.model.num_heads + c.model.d_k + 100 * s for s in range(3)}
        for row, c in configs.items()
    }
    factors = find_factors(configs)
    assert factors is not None
    contrasts = analyze_factors(scores, configs, factors)
    for x in by_kind(contrasts, "interaction").values():
        assert x.comparison.difference == pytest.approx(0)
    main = by_kind(contrasts, "main effect")
    assert main["num_heads 4 - 1"].comparison.difference == pytest.approx(30)
    assert main["d_k 8 - 4"].comparison.difference == pytest.approx(4)


def test_a_family_rarely_contains_a_false_effect() -> None:
    configs = make_configs()
    factors = find_factors(configs)
    assert factors is not None
    rng = np.random.default_rng(0)
    false = dict.fromkeys(("main effect", "matched contrast", "interaction"), 0)
    repetitions = 400
    for _ in range(repetitions):
        table = rng.normal(size=(6, 3)) + rng.normal(size=3)
        scores = {row: dict(enumerate(x.tolist())) for row, x in zip(configs, table, strict=True)}
        contrasts = analyze_factors(scores, configs, factors)
        for kind in false:
            family = by_kind(contrasts, kind).values()
            false[kind] += any(x.comparison.is_significant for x in family)
    for count in false.values():
        # If the true rate is 5%, the standard deviation of the measured rate is 1.1%.
        assert count / repetitions == pytest.approx(0.05, abs=0.035)


@pytest.mark.parametrize("kind", ["main effect", "matched contrast", "interaction"])
def test_high_variance_rows_rarely_cause_a_false_effect(kind: str) -> None:
    configs = make_configs()
    factors = find_factors(configs)
    assert factors is not None
    rng = np.random.default_rng(0)
    deviations = np.array([[1.0], [100.0], [1.0], [1.0], [80.0], [1.0]])
    false, repetitions = 0, 300
    for _ in range(repetitions):
        table = deviations * rng.normal(size=(6, 5)) + rng.normal(size=5)
        scores = {row: dict(enumerate(x.tolist())) for row, x in zip(configs, table, strict=True)}
        family = by_kind(analyze_factors(scores, configs, factors), kind)
        false += any(x.comparison.is_significant for x in family.values())
    # If the true rate is 5%, the standard deviation of the measured rate is 1.3%.
    assert false / repetitions < 0.09


def test_a_contrast_with_a_high_variance_row_has_its_own_deviation() -> None:
    configs = make_configs()
    scores, factors = draw_scores(configs, seeds=5), find_factors(configs)
    assert factors is not None
    scores["h4-k8"] = {seed: 100 * x for seed, x in scores["h4-k8"].items()}
    matched = by_kind(analyze_factors(scores, configs, factors), "matched contrast")
    found = matched["num_heads 4 - 1 at d_k 8"].comparison
    ours, theirs = (list(scores[row].values()) for row in ("h4-k8", "h1-k8"))
    for interval, level in ((found.welch, 0.95), (found.interval, 1 - 0.05 / 7)):
        test = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(level)
        assert interval == pytest.approx((test.low, test.high))
    assert found.p is None
    # Rows and contrasts that compare the same rows use the same standard deviation.
    analysis = analyze(scores)
    assert list(analysis.high_variance) == ["h4-k8"]
    assert analysis.deviation is not None
    pooled = matched["num_heads 2 - 1 at d_k 4"]
    low, high = limits(pooled)
    bonferroni = stats.t.ppf(1 - 0.05 / 7 / 2, analysis.freedom)
    half = (high - low) / 2
    assert half < bonferroni * analysis.deviation * math.sqrt(2 / 5)
    assert half == pytest.approx(bonferroni * analysis.deviation * math.sqrt(2 / 5), rel=0.05)
    assert pooled.comparison.p is not None
    # A main effect averages over the high-variance row, so it is not pooled either.
    main = by_kind(analyze_factors(scores, configs, factors), "main effect")
    assert [x.comparison.p is None for x in main.values()] == [True, False, True]


def test_two_seeds_give_no_interval_with_a_high_variance_row() -> None:
    configs = make_configs()
    scores, factors = draw_scores(configs, seeds=2), find_factors(configs)
    assert factors is not None
    scores["h4-k8"] = {0: 0.0, 1: 1000.0}
    found = analyze_factors(scores, configs, factors)
    assert {x.name for x in found if x.comparison.interval} == {
        "d_k 8 - 4 at num_heads 1",
        "d_k 8 - 4 at num_heads 2",
        "num_heads 2 - 1",
        "num_heads 2 - 1 at d_k 4",
        "num_heads 2 - 1 at d_k 8",
        "num_heads 4 - 1 at d_k 4",
        "(d_k 8 - 4) x (num_heads 2 - 1)",
    }


def test_rows_with_different_seeds_are_not_analyzed() -> None:
    configs = make_configs()
    scores, factors = draw_scores(configs), find_factors(configs)
    assert factors is not None
    first = next(iter(scores))
    for incomplete in (
        {**scores, first: {0: 1.0}},
        {row: x for row, x in scores.items() if row != first},
        {row: {0: x[0]} for row, x in scores.items()},
    ):
        assert analyze_factors(incomplete, configs, factors) == []


def collect_grid(path: Path, perplexity: Callable[[ModelConfig], float]) -> Results:
    """Return the results of a grid of four rows with two seeds, which have little noise."""
    rows = {name: Row(config) for name, config in make_configs(heads=(1, 2)).items()}
    sweep = plan_sweep(path, rows, 2)
    sweep.store()
    rng = np.random.default_rng(0)
    for run in sweep.runs:
        noise = math.exp(0.001 * rng.normal())
        write_results(run, perplexity(run.config.model) * noise, 10, splits=["dev"])
        set_status(run, "done")
    return collect(sweep)


def test_a_report_on_a_grid_contains_the_effects(tmp_path: Path) -> None:
    results = collect_grid(tmp_path / "s", lambda model: 4.0 * model.num_heads)
    folder = write_report(results)
    text = (folder / "table.md").read_text()
    assert "Effects of fields on ln perplexity on the development set" in text
    assert "num\\_heads 2 - 1 | main effect | +0.69" in text
    lines = (folder / "factors.csv").read_text().splitlines()
    assert lines[0] == ("effect,kind,score,split,difference,low,high,p,welch_low,welch_high,method")
    # Each score has two main effects, four matched contrasts, and one interaction.
    assert len(lines) == 1 + 2 * 7
    other = replace(results.rows["h2-k4"], has_other_text=True)
    changed = replace(results, rows={**results.rows, "h2-k4": other})
    assert changed.contrasts("perplexity", "dev") == []


def test_a_report_on_a_grid_answers_for_each_field_before_each_row(tmp_path: Path) -> None:
    # The effect of two heads is a factor of 2 with the small d_k, and of 3 with the large one.
    perplexity = {(1, 4): 4.0, (1, 8): 4.0, (2, 4): 8.0, (2, 8): 12.0}
    results = collect_grid(tmp_path / "s", lambda model: perplexity[model.num_heads, model.d_k])
    answers = answer_factors(results)
    assert list(answers) == ["interactions", "d_k 8 - 4, averaged", "num_heads 2 - 1, averaged"]
    # sqrt(6) is 2.449, and sqrt(3 / 2) is 1.225.
    assert answers["num_heads 2 - 1, averaged"].startswith("Worse in perplexity (+14")
    assert answers["d_k 8 - 4, averaged"].startswith("Worse in perplexity (+22.")
    # With two seeds, there is no Welch interval that could confirm the differences.
    assert all("Welch's interval" in sentence for sentence in answers.values())
    assert re.fullmatch(
        r"perplexity: \(d_k 8 - 4\) x \(num_heads 2 - 1\) \(\+(49|50)\.\d% \[.+\]\), "
        r"but there are too few seeds for Welch's interval; BLEU: none is significant\.",
        answers["interactions"],
    )
    folder = write_report(results)
    for text in ((folder / "index.html").read_text(), (folder / "table.md").read_text()):
        names = [x.replace("_", "\\_") if text[0] == "*" else x for x in (*answers, "h1-k8:")]
        places = [text.index(name) for name in names]
        assert places == sorted(places)
    assert answer_factors(replace(results, rows={"h1-k4": results.rows["h1-k4"]})) == {}


def test_equal_scores_show_no_effect() -> None:
    configs = make_configs()
    factors = find_factors(configs)
    assert factors is not None
    scores = {row: {0: 0.1, 1: 0.3} for row in configs}
    assert {x.comparison.p for x in analyze_factors(scores, configs, factors)} == {1.0}


def test_the_values_of_a_factor_can_be_tuples() -> None:
    names = itertools.product("xy", SIZES)
    texts = {
        f"{x}-k{k}": SMALL.change(data={"train": (f"{x}.en", f"{x}.de")}, model={"d_k": k})
        for x, k in names
    }
    found = []
    for configs in (texts, make_configs((1, 2))):
        factors = find_factors(configs)
        assert factors is not None
        found.append(analyze_factors(draw_scores(configs), configs, factors))
    ours, expected = (
        [x.comparison.difference for x in by_kind(c, "interaction").values()] for c in found
    )
    assert ours == pytest.approx(expected)
    assert any(x.name.startswith("train ('y.en', 'y.de') - ('x.en',") for x in found[0])
