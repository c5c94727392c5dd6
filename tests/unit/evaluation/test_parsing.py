from typing import Any

import pytest

from transformer_jax.data.trees import Bracket, Tree, read_trees
from transformer_jax.errors import DataError
from transformer_jax.evaluation.parsing import (
    BracketScores,
    describe_parses,
    make_right_branching,
    score_brackets,
    score_parses,
    scored_brackets,
)

REFERENCE = "(S (NP XX XX )NP (VP XX (NP XX XX )NP )VP . )S"
SENTENCE = "the cat sees a dog ."


def score(*hypotheses: str) -> dict[str, Any]:
    lines = [[line] * len(hypotheses) for line in (SENTENCE, REFERENCE)]
    return score_parses(lines[0], hypotheses, lines[1])


def test_a_correct_tree_scores_100() -> None:
    values = score(REFERENCE)
    assert (values["f1"], values["complete_match"], values["repaired"]) == (100, 100, 0)


def test_a_wrong_tag_for_punctuation_changes_nothing() -> None:
    assert score(REFERENCE.replace(".", "XX"))["f1"] == 100


def test_scores_count_brackets_after_repair() -> None:
    # The brackets S and VP are correct. The second NP is missing, and the first NP is one word too
    # short.
    values = score("(S (NP XX )NP XX (VP XX XX XX )VP .")
    assert values["repaired"] == 1
    assert (values["precision"], values["recall"]) == (pytest.approx(200 / 3), 50)
    # An empty translation has no brackets, but its sentence still counts.
    nothing = score("", REFERENCE)
    assert (nothing["sentences"], nothing["recall"], nothing["precision"]) == (2, 50, 100)


def test_the_baseline_and_short_sentences_are_scored_too() -> None:
    values = score(REFERENCE)
    # S (0-5) and VP (2-5) are correct, but the right-branching VP (1-5) and VP (3-5) are not.
    assert values["right_branching"]["f1"] == pytest.approx(50)
    words = " ".join(["a"] * 41)
    long = score_parses([words], ["(S " + "XX " * 41 + ")S"], ["(S " + "XX " * 41 + ")S"])
    assert (long["sentences"], long["short"]["sentences"]) == (1, 0)


def test_a_reference_that_is_not_a_tree_is_reported() -> None:
    with pytest.raises(DataError, match="reference 2 is not a linearized tree over the 2 words"):
        score_parses(["a", "a b"], ["(S XX )S"] * 2, ["(S XX )S"] * 2)


def test_a_word_can_contain_a_no_break_space() -> None:
    line = "(S XX XX )S"
    assert score_parses(["a\N{NO-BREAK SPACE}b  c"], [line], [line])["f1"] == 100


def test_the_description_has_all_scores() -> None:
    lines = "\n".join(describe_parses(score(REFERENCE, "(S")))
    assert "precision 100.00, recall 62.50" in lines
    assert "right-branching" in lines
    assert "short: at most 40 words" in lines
    assert "repaired    1 of 2 trees" in lines


# evalb (https://nlp.cs.nyu.edu/evalb) contains sample.gld (references), sample.tst (trees), and
# sample.rsl (scores). The sample's parameter file treats "This" and "this" as the same word, so the
# copy below uses "this". One sentence in the sample has no enclosing bracket, which evalb accepts.
# The copy encloses this sentence in a TOP bracket, which is not scored.
TEST = "(S (A (P this)) (B (Q is) (A (R a) (T test))))"
# This tree has 44 words: 11 copies of the same sentence.
LONG = f"(S {' '.join([TEST[3:-1]] * 11)})"
NOTHING = Tree((), (), ())
# Each tree to score is paired with evalb's counts of matched, expected, and proposed brackets, or
# with the reason why evalb does not score it. The reference is `TEST`, except for sentences 21 to
# 24.
SAMPLE: list[tuple[str, tuple[int, int, int] | str]] = [
    (TEST, (4, 4, 4)),
    ("(S (A (P this)) (B (Q is) (C (R a) (T test))))", (3, 4, 4)),
    ("(S (A (P this)) (B (Q is) (A (R a) (U test))))", (4, 4, 4)),
    ("(S (C (P this)) (B (Q is) (A (R a) (U test))))", (3, 4, 4)),
    ("(S (A (P this)) (B (Q is) (R a) (A (T test))))", (3, 4, 4)),
    ("(S (A (P this) (Q is)) (A (R a) (T test)))", (2, 4, 3)),
    ("(S (P this) (Q is) (R a) (T test))", (1, 4, 1)),
    ("(TOP (P this) (Q is) (R a) (T test))", (0, 4, 0)),
    ("(S (A (P this)) (B (Q is) (A (A (R a) (T test)))))", (4, 4, 5)),
    ("(S (A (P this)) (B (Q is) (A (A (A (A (A (R a) (T test))))))))", (4, 4, 8)),
    ("", "skipped"),
    ("(S (A (P this)) (B (Q was) (A (A (R a) (T test)))))", "errors"),
    ("(S (A (P this)) (B (Q is) (U not) (A (A (R a) (T test)))))", "errors"),
    ("", "skipped"),
    (f"(TOP {TEST})", (4, 4, 4)),
    ("(S (A (P this)) (NONE *) (B (Q is) (A (R a) (T test))))", "errors"),
    ("(S (A (P this)) (S (NONE abc) (A (NONE *))) (B (Q is) (A (R a) (T test))))", "errors"),
    ("(S (A (P this)) (B (Q is) (A (R a) (TT test))))", (4, 4, 4)),
    (TEST, (4, 4, 4)),
    ("(S (A (P That)) (B (Q is) (A (R a) (T test))))", "errors"),
    (TEST, (4, 4, 4)),
    (LONG, (34, 34, 34)),
    (f"{TEST[:-1]} (-NONE- *))", (4, 4, 4)),
    (f"{TEST[:-1]} (: *))", (4, 4, 4)),
]
REFERENCES = {
    21: "(S (A-SBJ-1 (P this)) (B-PRD (Q is) (A (R a) (T test))))",
    22: LONG,
    23: f"{TEST[:-1]} (-NONE- *))",
    24: f"{TEST[:-1]} (: *))",
}


def tree_of(text: str) -> Tree:
    return next(read_trees([text], "trees"), NOTHING)


PAIRS = [
    (tree_of(REFERENCES.get(i, TEST)), tree_of(text)) for i, (text, _) in enumerate(SAMPLE, start=1)
]


@pytest.mark.parametrize("index", range(len(SAMPLE)))
def test_each_sentence_of_evalbs_sample_has_evalbs_counts(index: int) -> None:
    scores, expected = score_brackets([PAIRS[index]]), SAMPLE[index][1]
    if isinstance(expected, str):
        assert scores == BracketScores(sentences=1, **{expected: 1})
    else:
        assert (scores.matched, scores.expected, scores.proposed) == expected


def rounded(scores: BracketScores) -> list[float]:
    values = scores.recall, scores.precision, scores.complete_match
    return [round(value, 2) for value in values]


def test_evalbs_sample_has_evalbs_totals() -> None:
    scores = score_brackets(PAIRS)
    assert (scores.sentences, scores.errors, scores.skipped) == (24, 5, 2)
    assert (scores.matched, scores.expected, scores.proposed) == (86, 98, 95)
    assert rounded(scores) == [87.76, 90.53, 52.94]
    assert scores.f1 == pytest.approx(2 * 86 / (98 + 95) * 100)


def test_evalbs_sample_has_evalbs_totals_up_to_40_words() -> None:
    scores = score_brackets(PAIRS, 40)
    assert (scores.sentences, scores.errors, scores.skipped) == (23, 5, 2)
    assert rounded(scores) == [81.25, 85.25, 50.0]


def test_punctuation_does_not_count_but_the_length_includes_it() -> None:
    with_comma = tree_of("(S (NP (NN a) (, ,)) (VP (VB b)) (. .))")
    without = tree_of("(S (NP (NN a)) (, ,) (VP (VB b) (. .)))")
    assert score_brackets([(with_comma, without)]).f1 == 100
    assert scored_brackets(with_comma)[Bracket("VP", 1, 2)] == 1
    assert score_brackets([(with_comma, without)], 3).sentences == 0
    # Other symbols, such as parentheses, count as words.
    assert scored_brackets(tree_of("(PRN (-LRB- -LRB-) (NN a))")) == {("PRN", 0, 2): 1}
    # A constituent that consists only of punctuation has no words.
    assert scored_brackets(tree_of("(S (NP (: -)) (NN a))")) == {("S", 0, 1): 1}


def test_particles_and_adverbs_have_the_same_label() -> None:
    pair = [tree_of(f"(VP (VB give) ({label} (RP up)))") for label in ("PRT", "ADVP")]
    assert score_brackets([(pair[0], pair[1])]).f1 == 100


def test_repeated_brackets_count_once_each() -> None:
    once, twice = tree_of("(NP (NN a))"), tree_of("(NP (NP (NN a)))")
    scores = score_brackets([(once, twice), (twice, once)])
    assert (scores.matched, scores.expected, scores.proposed) == (2, 3, 3)


def test_no_brackets_score_zero() -> None:
    scores = score_brackets([])
    assert (scores.f1, scores.recall, scores.precision, scores.complete_match) == (0, 0, 0, 0)


def test_the_baseline_branches_to_the_right_and_skips_punctuation() -> None:
    tree = make_right_branching(tree_of("(S (NP (NN a)) (, ,) (VP (VB b) (NP (NN c))) (. .))"))
    assert tree.brackets == (("S", 0, 5), ("VP", 2, 5))
    assert make_right_branching(tree_of("(NP (NN a) (. .))")).brackets == (("S", 0, 2),)
