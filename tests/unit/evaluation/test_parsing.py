from typing import Any

import pytest

from transformer_jax.errors import DataError
from transformer_jax.evaluation.parsing import describe_parses, score_parses

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
