"""The answers in a report: one sentence for each row, and one for the report as a whole."""

import itertools
import math
from collections.abc import Mapping

from transformer_jax.reports.results import MARGINS, PaperScore, Results, ScoredSplit
from transformer_jax.reports.seed_statistics import RowComparison, Verdict
from transformer_jax.sweeps.plan import find_copied

LABELS: dict[PaperScore, str] = {"perplexity": "perplexity", "bleu": "BLEU"}
UNCONFIRMED = ", but Welch's interval includes 0"
NO_WELCH = ", but there are too few seeds for Welch's interval"
# Verbs that state how one row, or several rows, compare with the paper.
WORDS: dict[Verdict, tuple[str, str]] = {
    "as in the paper": ("agrees", "agree"),
    "differs": ("disagrees", "disagree"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "out of reach": ("is out of reach", "are out of reach"),
}


def question(results: Results) -> str:
    """Return the question that a report answers."""
    others = len(results.compared)
    if not others:
        return f"How good is {results.base.name}?"
    rows = f"which of the {others} other rows differ" if others > 1 else "does the other row differ"
    pairs = itertools.product(results.compared, LABELS)
    has_paper = any(results.paper_difference(*pair) is not None for pair in pairs)
    paper = ", and are the differences those in the paper" if has_paper else ""
    return f"{rows[0].upper()}{rows[1:]} from {results.base.name}{paper}?"


def summarize(results: Results) -> list[str]:
    """Return sentences that state which set the answers use and which claims are confirmed."""
    split = results.splits[-1]
    other = ""
    if len(results.splits) > 1:
        other = " Settings may have been chosen on the development set, which is reported below."
    sentences = [f"These answers use the {_name(split)} set.{other}"]
    sentences += [x for score in LABELS if (x := _summarize_score(results, score, split))]
    controls = [name for name, row in results.rows.items() if row.is_control]
    return sentences + [x for name in controls if (x := _describe_control(results, name, split))]


def _describe_control(results: Results, name: str, split: ScoredSplit) -> str:
    """Return a control's difference from the row that it copies, which arose by chance."""
    parts: list[str] = []
    significant: list[str] = []
    for score, label in LABELS.items():
        control = results.compare_control(name, score, split)
        if control.difference is None:
            continue
        parts.append(f"by {_describe(control, score)} in {label}")
        if _judge(control, score) in ("worse", "better"):
            significant.append(label)
    if not parts:
        return ""
    copied = find_copied(results.sweep.rows, name)
    sentence = f"Control: {name} is a copy of {copied} with other seeds, so it differs only by "
    sentence += f"chance, here {' and '.join(parts)}."
    if not significant:
        return sentence
    labels = " and ".join(significant)
    verb = "interval for {} excludes" if len(significant) == 1 else "intervals for {} exclude"
    return f"{sentence} The {verb.format(labels)} 0, as at most 5% of such intervals do."


def answer(results: Results, name: str) -> str:
    """Return one sentence that compares a row with the first row."""
    split = results.splits[-1]
    comparisons = {score: results.compare(name, score, split) for score in LABELS}
    sentence = _state(comparisons)
    if not sentence:
        for row in (results.rows[name], results.base):
            if row.failed and not row.find("perplexity", "dev"):
                return (
                    f"not compared, because no run of {row.name} has a lower perplexity than a "
                    "unigram model. Train for more steps, or with other settings."
                )
            if not any(row.find(score, split) for score in LABELS):
                return f"not compared, because {row.name} has no scores on the {_name(split)} set."
        return f"not compared, because it and {results.base.name} have no comparable scores."
    verdicts = {score: results.verdict(name, score, split) for score in LABELS}
    found = [
        f"{_paper(results, name, score)} in {LABELS[score]} "
        f"({verdict}{_other_verdict(results, name, score, split)})"
        for score, verdict in verdicts.items()
        if verdict
    ]
    return f"{sentence} In the paper: {'; '.join(found)}." if found else sentence


def _other_verdict(results: Results, name: str, score: PaperScore, split: ScoredSplit) -> str:
    """Return the verdict with Welch's interval if it does not confirm a definite verdict."""
    definite, other = (
        results.verdict(name, score, split, method) for method in ("interval", "welch")
    )
    if definite in ("as in the paper", "differs") and other not in (definite, None):
        return f"; with Welch's interval, {other}"
    return ""


def answer_factors(results: Results) -> dict[str, str]:
    """Return one sentence for all interactions, and one for each main effect, keyed by name.

    The result is empty unless the rows are all combinations of the values of several fields and
    all rows have the same seeds, at least two of them.
    """
    split = results.splits[-1]
    effects: dict[str, dict[PaperScore, RowComparison]] = {}
    interactions = []
    for score, label in LABELS.items():
        found = []
        for x in (contrasts := results.contrasts(score, split)):
            if x.kind == "main effect":
                effects.setdefault(f"{x.name}, averaged", {})[score] = x.comparison
            elif x.kind == "interaction" and x.comparison.is_significant:
                caveat = _find_caveat(x.comparison)
                found.append(f"{x.name} ({_describe(x.comparison, score)}){caveat}")
        if contrasts:
            interactions.append(f"{label}: {', '.join(found) or 'none is significant'}")
    answers = {name: _state(comparisons) for name, comparisons in effects.items()}
    # A main effect is hard to interpret if there is an interaction.
    return ({"interactions": f"{'; '.join(interactions)}."} if interactions else {}) | answers


def _find_caveat(comparison: RowComparison) -> str:
    """Return that Welch's interval does not confirm a difference, or "" if it does."""
    if not comparison.is_unconfirmed:
        return ""
    return UNCONFIRMED if comparison.welch else NO_WELCH


def _state(comparisons: Mapping[PaperScore, RowComparison]) -> str:
    """Return a sentence about differences in each score, or "" if there are none."""
    sentence = "; ".join(
        f"{_judge(x, score)} in {LABELS[score]} ({_describe(x, score)}){_find_caveat(x)}"
        for score, x in comparisons.items()
        if x.difference is not None
    )
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def describe_reach(results: Results, score: PaperScore, split: ScoredSplit) -> str:
    """Return how many seeds are necessary to show equivalence, or "" if unknown."""
    found = results.seeds_for_equivalence(score, split)
    if found is None:
        return ""
    seeds, low, high = found
    high_variance = results.analyses[split][score].high_variance
    rows = "each row that is not a high-variance row" if high_variance else "each row"
    return (
        f"To show that a row and {results.base.name} have equal {LABELS[score]} on the "
        f"{_name(split)} set (within {describe_margin(score)}), {rows} needs at least "
        f"{seeds:,} seeds (95% interval: {low:,} to {high:,}); {results.base.name} has "
        f"{len(results.base.find(score, split))}."
    )


def describe_margin(score: PaperScore) -> str:
    """Return the largest difference that counts as equal, such as "0.2 BLEU"."""
    return f"{MARGINS[score]:g} {'ln ' if score == 'perplexity' else ''}{LABELS[score]}"


def _name(split: ScoredSplit) -> str:
    return "development" if split == "dev" else "test"


def _summarize_score(results: Results, score: PaperScore, split: ScoredSplit) -> str:
    """Return how many claims are confirmed, and how many seeds the open questions need."""
    is_open = any(
        _judge(results.compare(name, score, split), score) == "not clearly different"
        or results.verdict(name, score, split) == "out of reach"
        for name in results.compared
    )
    reach = describe_reach(results, score, split) if is_open else ""
    return f"{_compare_claims(results, score, split)} {reach}".strip()


def _compare_claims(results: Results, score: PaperScore, split: ScoredSplit) -> str:
    """Return how many of the paper's claims about one score are confirmed."""
    verdicts: dict[bool, list[Verdict]] = {True: [], False: []}
    for name in results.rows:
        if (verdict := results.verdict(name, score, split)) is not None:
            paper = results.paper_difference(name, score)
            verdicts[abs(paper or 0.0) > MARGINS[score]].append(verdict)
    parts = []
    for is_above, found in verdicts.items():
        if found:
            size = f"{'exceeds' if is_above else 'is at most'} {describe_margin(score)}"
            counts = [(found.count(x), words) for x, words in WORDS.items() if x in found]
            listed = ", ".join(f"{n} {words[n > 1]}" for n, words in counts)
            rows = f"{len(found)} rows" if len(found) > 1 else "one row"
            rows = f"of the {rows} whose difference in the paper {size}"
            parts.append(f"{rows}, {listed}")
    if not parts:
        return ""
    label = LABELS[score]
    return f"{label[0].upper()}{label[1:]}: {'; '.join(parts)}."


def _judge(comparison: RowComparison, score: PaperScore) -> str:
    """Return whether a row is better or worse than the first row."""
    if comparison.interval is None:
        return "unclear"
    low, high = comparison.interval
    if comparison.interval.is_point:
        # All seeds have the same score, such as 0 BLEU, so their deviation is not known.
        return "not clearly different"
    if score == "bleu":
        low, high = -high, -low
    if low > 0:
        return "worse"
    if high < 0:
        return "better"
    is_equal = comparison.interval.is_within(MARGINS[score])
    return "equal" if is_equal else "not clearly different"


def _describe(comparison: RowComparison, score: PaperScore) -> str:
    """Return the difference and its interval, in percent for perplexity and in points for BLEU."""
    values = [comparison.difference or 0.0, *(comparison.interval or ())]
    if score == "perplexity":
        # Larger differences cannot be written as a percentage.
        difference, *ends = (f"{math.expm1(min(x, 700.0)):+.1%}" for x in values)
    else:
        difference, *ends = (f"{x:+.2f}" for x in values)
    return f"{difference} [{', '.join(ends)}]" if ends else f"{difference}, no interval"


def _paper(results: Results, name: str, score: PaperScore) -> str:
    difference = results.paper_difference(name, score) or 0.0
    return f"{math.expm1(difference):+.1%}" if score == "perplexity" else f"{difference:+z.1f}"
