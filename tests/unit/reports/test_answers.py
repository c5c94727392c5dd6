"""Test the sentences at the beginning of a report."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import collect, set_status, write_results

from transformer_jax.api import report
from transformer_jax.config import Paper, Row
from transformer_jax.config.rows import with_control
from transformer_jax.errors import UsageError
from transformer_jax.reports.answers import answer, describe_reach, question, summarize
from transformer_jax.reports.figures import CONTROL_CAPTION, describe_ratios
from transformer_jax.reports.footnotes import list_footnotes
from transformer_jax.reports.report import list_comparisons, write_report
from transformer_jax.reports.results import Results
from transformer_jax.sweeps.plan import plan_sweep

PAPERS = {"base": Paper(5.0, 25.0), "worse": Paper(6.0, 24.0), "equal": Paper(5.0, 25.0)}
PERPLEXITIES = {"base": 4.0, "worse": 4.4, "equal": 4.0}


def make_results(path: Path, noise: float) -> Results:
    """Return results whose perplexities differ between seeds by about this much."""
    rows = {
        name: Row(SMALL.change(model={"d_ff": 32 + i}), paper)
        for i, (name, paper) in enumerate(PAPERS.items())
    }
    sweep = plan_sweep(path / "s", rows, 3)
    sweep.store()
    for run in sweep.runs:
        shift = noise * (list(rows).index(run.row) * run.seed % 3)
        write_results(run, PERPLEXITIES[run.row] + shift, 10, splits=["dev"])
        set_status(run, "done")
    return collect(sweep)


def test_a_report_asks_what_it_compares(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.001)
    assert question(results) == (
        "Which of the 2 other rows differ from base, and are the differences those in the paper?"
    )
    rows = dict(list(results.rows.items())[:2])
    assert question(replace(results, rows=rows)).startswith("Does the other row differ from base")
    assert question(replace(results, rows={"base": rows["base"]})) == "How good is base?"


def test_each_row_has_one_sentence_with_its_intervals_and_the_papers_differences(
    tmp_path: Path,
) -> None:
    results = make_results(tmp_path, 0.0001)
    worse, equal = answer(results, "worse"), answer(results, "equal")
    assert worse.startswith("Worse in perplexity (+10.0% [+")
    assert "In the paper: +20.0% in perplexity (as in the paper); -1.0 in BLEU (" in worse
    assert equal.startswith("Equal in perplexity (")
    assert "+0.0% in perplexity (as in the paper)" in equal
    # All BLEU scores are the same, so they say nothing about the deviation between seeds. The
    # sign of each bound depends on how the CPU rounds.
    rounded = equal.replace("-0.00", "+0.00")
    assert "not clearly different in BLEU (+0.00 [+0.00, +0.00])" in rounded


def test_an_answer_says_that_a_row_has_too_few_seeds_for_welchs_interval(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.001)
    worse, caveat = results.rows["worse"], "too few seeds for Welch's interval; "
    assert "Welch" not in answer(results, "worse")
    # One of the three seeds failed to train.
    failed = {name: {k: by_seed[k] for k in (0, 1)} for name, by_seed in worse.scores.items()}
    rows = {**results.rows, "worse": replace(worse, scores=failed)}
    few = answer(replace(results, rows=rows), "worse")
    assert few.startswith("Worse in perplexity (+")
    assert f"%]), but there are {caveat}" in few


def test_an_answer_says_that_welchs_interval_does_not_confirm_a_verdict(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.0001)
    assert "with Welch" not in answer(results, "worse")
    # The other rows vary less, so the pooled standard deviation is too small for the row "worse".
    shifts = {"base": (0, 0.02, -0.02), "worse": (-0.05, 0.05, 0), "equal": (0.02, 0, -0.02)}

    def shift(name: str) -> dict[int, float]:
        return {i: PERPLEXITIES[name] * math.exp(x) for i, x in enumerate(shifts[name])}

    rows = {
        name: replace(row, scores={**row.scores, "perplexity": shift(name)})
        for name, row in results.rows.items()
    }
    noisy = answer(replace(results, rows=rows), "worse")
    assert "%]), but Welch's interval includes 0; " in noisy
    assert "+20.0% in perplexity (as in the paper; with Welch's interval, inconclusive); " in noisy


def test_the_summary_counts_the_papers_claims(tmp_path: Path) -> None:
    first, perplexity, _ = summarize(make_results(tmp_path, 0.0001))
    assert first == "These answers use the development set."
    assert perplexity == (
        "Perplexity: of the one row whose difference in the paper exceeds 0.01 ln perplexity, "
        "1 agrees; of the one row whose difference in the paper is at most 0.01 ln perplexity, "
        "1 agrees."
    )


def test_equality_that_is_out_of_reach_is_not_called_a_disagreement(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.1)
    _, perplexity, _ = summarize(results)
    assert "is at most 0.01 ln perplexity, 1 is out of reach." in perplexity
    reach = describe_reach(results, "perplexity", "dev")
    assert reach in perplexity
    found = results.seeds_for_equivalence("perplexity", "dev")
    assert found is not None
    seeds, low, high = found
    assert low < seeds < high
    interval = f"(95% interval: {low:,} to {high:,})"
    assert f"each row needs at least {seeds:,} seeds {interval}; base has 3." in reach


def test_a_report_says_how_many_seeds_would_show_that_rows_are_equal(tmp_path: Path) -> None:
    noisy, precise = (make_results(tmp_path / str(x), x) for x in (0.1, 0.0001))
    # Without claims in the paper, no row is clearly different from base.
    rows = {name: replace(row, paper=Paper()) for name, row in noisy.rows.items()}
    results = replace(noisy, rows=rows)
    assert summarize(results)[1:] == [describe_reach(results, "perplexity", "dev")]
    # If all rows are clearly different or equal, only the notes contain the number.
    reach = describe_reach(precise, "perplexity", "dev")
    assert not any(reach in sentence for sentence in summarize(precise))
    assert reach in list_footnotes(precise)


@pytest.mark.parametrize(
    ("perplexities", "mean", "is_significant"),
    [((4.3, 4.1, 4.2), "+5.0%", False), ((4.2, 4.2002, 4.1998), "+5.0%", True)],
)
def test_a_control_shows_a_difference_that_is_not_counted(
    tmp_path: Path, perplexities: tuple[float, ...], mean: str, is_significant: bool
) -> None:
    plain = make_results(tmp_path / "plain", 0.001)
    sweep = plan_sweep(tmp_path / "s", with_control(plain.sweep.rows), 3)
    sweep.store()
    for run in sweep.runs:
        if run.row == "control":
            score = perplexities[run.seed - 20_000]
        else:
            score = plain.rows[run.row].scores["perplexity"][run.seed]
        write_results(run, score, 10, splits=["dev"])
        set_status(run, "done")
    results = collect(sweep)
    assert question(results) == question(plain)
    assert results.analyses == plain.analyses
    *sentences, sentence = summarize(results)
    assert sentences == summarize(plain)
    assert sentence.startswith(
        "Control: control is a copy of base with other seeds, so it differs only by chance, here "
        f"by {mean} ["
    )
    assert "] in perplexity and by +0.00 [" in sentence
    # The sentence does not compare the differences of other rows with this random difference.
    assert "rows" not in sentence
    assert ("The interval for perplexity excludes 0" in sentence) is is_significant
    assert results.verdict("control", "perplexity") is None
    head, *lines = list_comparisons(results)
    methods = {(line[0], line[head.index("method")]) for line in lines}
    assert methods == {("worse", "Dunnett"), ("equal", "Dunnett"), ("control", "Welch")}
    assert describe_ratios(results) == describe_ratios(plain) + CONTROL_CAPTION
    assert CONTROL_CAPTION in (write_report(results) / "table.md").read_text()
    # With another baseline, the sentence still compares the control with the row that it copies.
    other = replace(results, rows={"worse": results.rows["worse"], **results.rows})
    same = results.compare_control("control", "perplexity", "dev")
    assert other.compare_control("control", "perplexity", "dev") == same
    differences = [x.compare("control", "perplexity").difference for x in (results, other)]
    assert differences[0] == same.difference
    assert differences[1] == pytest.approx(math.log(1.05 / 1.1), abs=0.01)
    unequal = replace(results.rows["control"], has_other_text=True)
    mixed = replace(results, rows={**results.rows, "control": unequal})
    assert mixed.compare("control", "perplexity").difference is None
    with pytest.raises(UsageError, match="row 'control' is a control: choose the row that it "):
        report(sweep.path, baseline="control")


def test_a_row_without_intervals_or_scores_is_not_judged(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.1)
    single = collect(plan_sweep(tmp_path / "s", results.sweep.rows, 1))
    assert answer(single, "worse").startswith("Unclear in perplexity (+10.0%, no interval)")
    assert describe_reach(single, "perplexity", "dev") == ""
    empty = replace(results.rows["worse"], scores={})
    nothing = replace(results, rows={**results.rows, "worse": empty})
    missing = "not compared, because worse has no scores on the dev"
    assert answer(nothing, "worse").startswith(missing)
    reverse = replace(nothing, rows={"worse": empty, "equal": results.rows["equal"]})
    assert answer(reverse, "equal").startswith(missing)
    failed = replace(results, rows={**results.rows, "worse": replace(empty, failed={0: 900.0})})
    assert answer(failed, "worse").startswith("not compared, because no run of worse has a lower ")
    # Without common scores, there is nothing to compare.
    only = replace(empty, scores={"bleu": {0: 5.0}})
    pair = {"base": replace(empty, name="base", scores={"perplexity": {0: 5.0}}), "worse": only}
    reason = "not compared, because it and base have no comparable scores."
    assert answer(replace(results, rows=pair), "worse") == reason


def test_the_answers_use_a_set_on_which_rows_can_be_compared(tmp_path: Path) -> None:
    results = make_results(tmp_path, 0.1)
    assert results.splits == ("dev",)

    def add_test_scores(*names: str) -> Results:
        scored = {
            name: replace(row, scores={**row.scores, "test_bleu": row.scores["bleu"]})
            for name, row in results.rows.items()
            if name in names
        }
        return replace(results, rows={**results.rows, **scored})

    assert add_test_scores("worse", "equal").splits == ("dev",)
    assert add_test_scores("base").splits == ("dev",)
    assert add_test_scores("base", "worse").splits == ("dev", "test")
    without_dev = {
        name: replace(row, scores={"test_bleu": row.scores["bleu"]})
        for name, row in results.rows.items()
    }
    assert replace(results, rows=without_dev).splits == ("test",)
    # Before a second row is scored, the report shows the scores of the first row.
    first = {**results.rows, "worse": replace(results.rows["worse"], scores={})}
    first["equal"] = replace(first["equal"], scores={})
    assert replace(results, rows=first).splits == ("dev",)


@pytest.mark.parametrize("paper", [Paper(), Paper(5.0)])
def test_the_paper_is_compared_only_where_it_has_scores(tmp_path: Path, paper: Paper) -> None:
    results = make_results(tmp_path, 0.0001)
    rows = {name: replace(row, paper=paper) for name, row in results.rows.items()}
    sentence = answer(replace(results, rows=rows), "worse")
    assert ("In the paper" in sentence) is bool(paper.perplexity)
    assert "in BLEU (as" not in sentence
