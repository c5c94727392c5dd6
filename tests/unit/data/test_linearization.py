import random

import pytest

from transformer_jax.data.linearization import linearize, parse_linearized
from transformer_jax.data.trees import Tree, read_trees


def tree_of(text: str) -> Tree:
    [tree] = read_trees([text], "trees")
    return tree


def spans(line: str, num_words: int) -> list[tuple[str, int, int]]:
    return [tuple(bracket) for bracket in parse_linearized(line, num_words).brackets]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # The example in figure 1 of Vinyals et al. (2015).
        ("(S (VP (VB Go)) (. .))", "(S (VP XX )VP . )S"),
        (
            "(S (NP-SBJ (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))",
            "(S (NP XX )NP (VP XX (NP XX XX )NP )VP . )S",
        ),
        ("(NP (NP (NN a)) (, ,) (NP (NN b)))", "(NP (NP XX )NP , (NP XX )NP )NP"),
        ("( (NP (NN a)) (NP (NN b)))", "(NP XX )NP (NP XX )NP"),
    ],
)
def test_a_tree_becomes_the_symbols_of_vinyals_et_al(text: str, line: str) -> None:
    tree = tree_of(text)
    assert linearize(tree.tags, tree.brackets) == line


def random_tree(rng: random.Random, depth: int = 0) -> str:
    if depth > 5 or (depth > 0 and rng.random() < 0.4):
        return f"({rng.choice(['NN', ',', 'VB'])} w)"
    children = " ".join(random_tree(rng, depth + 1) for _ in range(rng.randint(1, 3)))
    return f"({rng.choice(['S', 'NP', 'VP'])} {children})"


@pytest.mark.parametrize("seed", range(20))
def test_the_symbols_of_a_tree_parse_to_the_same_tree(seed: int) -> None:
    tree = tree_of(random_tree(random.Random(seed)))
    parse = parse_linearized(linearize(tree.tags, tree.brackets), len(tree.words))
    assert parse.brackets == tree.brackets
    assert not parse.is_repaired


@pytest.mark.parametrize(
    ("line", "num_words", "expected"),
    [
        # The missing closing brackets are added at the end.
        ("(S (NP XX )NP (VP XX", 2, [("S", 0, 2), ("NP", 0, 1), ("VP", 1, 2)]),
        # The closing bracket of S also closes NP.
        ("(S (NP XX XX )S", 2, [("S", 0, 2), ("NP", 0, 2)]),
        # A closing bracket without a matching opening bracket is dropped.
        ("(S XX )VP XX )S )NP", 2, [("S", 0, 2)]),
        # A bracket without words is dropped.
        ("(S (NP )NP XX )S", 1, [("S", 0, 1)]),
        # Extra word symbols are dropped.
        ("(S (NP XX XX XX )NP (VP XX )VP )S", 2, [("S", 0, 2), ("NP", 0, 2)]),
        # Words without symbols belong to the outermost bracket.
        ("(S (NP XX )NP )S", 3, [("S", 0, 3), ("NP", 0, 1)]),
        ("(S (NP XX", 3, [("S", 0, 3), ("NP", 0, 1)]),
        ("", 2, []),
        ("(S (NP", 2, [("S", 0, 2)]),
    ],
)
def test_other_symbols_are_repaired(
    line: str, num_words: int, expected: list[tuple[str, int, int]]
) -> None:
    parse = parse_linearized(line, num_words)
    assert [tuple(bracket) for bracket in parse.brackets] == expected
    assert parse.is_repaired
    assert len(parse.tags) == num_words


@pytest.mark.parametrize("seed", range(20))
def test_any_symbols_become_a_tree_that_needs_no_repair(seed: int) -> None:
    rng = random.Random(seed)
    symbols = ["(S", "(NP", ")NP", ")S", "XX", ",", "(", ")", "\N{DOUBLE QUESTION MARK}"]
    line = " ".join(rng.choices(symbols, k=rng.randint(0, 30)))
    parse = parse_linearized(line, 6)
    again = parse_linearized(linearize(parse.tags, parse.brackets), 6)
    assert again.brackets == parse.brackets
    assert not again.is_repaired


def test_a_label_can_contain_a_no_break_space() -> None:
    line = "(S\N{NO-BREAK SPACE}x  XX )S\N{NO-BREAK SPACE}x"
    assert spans(line, 1) == [("S\N{NO-BREAK SPACE}x", 0, 1)]
    assert not parse_linearized(line, 1).is_repaired


def test_a_wrong_tag_needs_no_repair() -> None:
    assert not parse_linearized("(S XX . )S", 2).is_repaired
    assert not parse_linearized("(S . XX )S", 2).is_repaired
