import pytest

from transformer_jax.data.trees import Bracket, Tree, read_trees, strip_function_tags
from transformer_jax.errors import DataError


def read(text: str, *, one_per_line: bool = False) -> list[Tree]:
    return list(read_trees(text.split("\n"), "x.mrg", one_per_line=one_per_line))


def test_a_tree_can_span_lines_and_a_line_can_hold_trees() -> None:
    text = """
( (S
    (NP-SBJ (DT The) (NN cat))

    (VP (VBZ sits)) (. .)) )
(NP (NN One)) (NP (NN two))"""
    sentence, one, two = read(text)
    assert sentence == Tree(
        ("The", "cat", "sits", "."),
        ("DT", "NN", "VBZ", "."),
        (Bracket("S", 0, 4), Bracket("NP", 0, 2), Bracket("VP", 2, 3)),
    )
    assert (one.words, two.words) == (("One",), ("two",))


@pytest.mark.parametrize("top", ["", "TOP", "ROOT", "S1"])
def test_the_bracket_around_the_whole_tree_is_removed(top: str) -> None:
    assert read(f"({top} (NP (NN cat)))") == read("(NP (NN cat))")
    # If the outer bracket contains several trees, they all belong to one sentence.
    assert read(f"({top} (NP (NN a)) (NP (NN b)))")[0].brackets == (("NP", 0, 1), ("NP", 1, 2))


def test_empty_elements_and_constituents_of_nothing_else_are_removed() -> None:
    text = "(S (NP-SBJ-1 (-NONE- *)) (VP (TO to) (VP (VB go) (SBAR (-NONE- 0) (S (-NONE- *T*))))))"
    assert read(text) == read("(S (VP (TO to) (VP (VB go))))")


@pytest.mark.parametrize(
    ("label", "category"),
    [("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("VP", "VP"), ("PP-LOC=3", "PP"), ("-LRB-", "-LRB-")],
)
def test_function_tags_are_removed(label: str, category: str) -> None:
    assert strip_function_tags(label) == category


def test_tags_of_words_are_kept_whole() -> None:
    [tree] = read("(PRN (-LRB- -LRB-) (PRP$ its) (-RRB- -RRB-))")
    assert tree.tags == ("-LRB-", "PRP$", "-RRB-")
    assert tree.brackets == (("PRN", 0, 3),)


def test_a_word_with_spaces_becomes_one_word() -> None:
    [tree] = read("(NP (NN Xpd TTD) (NN a\N{NO-BREAK SPACE}b))")
    assert tree.words == ("Xpd_TTD", "a\N{NO-BREAK SPACE}b")


def test_unary_brackets_keep_their_order() -> None:
    assert read("(S (VP (VP (VB Go))))")[0].brackets == (("S", 0, 1), ("VP", 0, 1), ("VP", 0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NN a)\n(NN b)", "line 1: the tree that begins here is never closed"),
        ("(S (NN a)))", r"line 1: '\)' is outside of all brackets"),
        ("\nword", "line 2: 'word' is outside of all brackets"),
        ("(S (NN a)\n(NP))", r"line 2: the bracket \(NP\) has no words"),
        ("(S ())", r"line 1: the bracket \(\) has no words"),
        ("(S (NN a) b)", "line 1: the word 'b' follows a bracket"),
        ("(NN a (NN b))", "line 1: a bracket follows the word 'a'"),
        ("(S ((NN a)))", "line 1: a bracket has no label"),
        ("(S (-NONE- *))", "line 1: a tree has no words"),
    ],
)
def test_an_invalid_bracket_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^x\.mrg, {message}") as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(NP (NN a)) (NP (NN b))", "line 1: there is more than one tree"),
        ("(NP (NN a)\n(NN b))", "line 1: the tree is incomplete"),
    ],
)
def test_a_line_must_hold_one_tree_if_the_format_says_so(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(text, one_per_line=True)
