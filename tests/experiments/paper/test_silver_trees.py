"""Test that a parser's output becomes trees that training can read."""

import runpy
from pathlib import Path

import pytest
from corpora import sentences

from experiments.paper import silver_trees
from experiments.paper.silver_trees import make_trees
from transformer_jax.data.linearization import linearize
from transformer_jax.data.trees import read_trees


def test_the_trees_are_those_of_the_symbols_and_the_words() -> None:
    gold = list(read_trees(sentences(30), "gold"))
    texts = [" ".join(tree.words) for tree in gold]
    symbols = [linearize(tree.tags, tree.brackets) for tree in gold]
    silver = list(read_trees(make_trees(texts, symbols), "silver", one_per_line=True))
    assert [(tree.words, tree.brackets) for tree in silver] == [(x.words, x.brackets) for x in gold]
    assert [linearize(tree.tags, tree.brackets) for tree in silver] == symbols


def test_a_tree_that_needed_repair_is_left_out() -> None:
    lines = ["(S XX XX )S", "(S XX XX", "(S XX )S", "(S XX XX )NP", ""]
    assert list(make_trees(["a b"] * 5, lines)) == ["( (S (XX a)(XX b)) )"]
    with pytest.raises(ValueError, match="zip"):
        list(make_trees(["a b"], []))


def test_the_command_separates_lines_only_at_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (("text", "a\x0cb\n"), ("symbols", "(S XX XX )S\n")):
        (tmp_path / name).write_text(line, "utf-8")
    arguments = ["silver_trees", str(tmp_path / "text"), str(tmp_path / "symbols")]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(silver_trees.__file__, run_name="__main__")
    assert capsys.readouterr().out == "( (S (XX a)(XX b)) )\n"
    monkeypatch.setattr("sys.argv", arguments[:1])
    with pytest.raises(SystemExit, match="usage: "):
        runpy.run_path(silver_trees.__file__, run_name="__main__")


def test_parentheses_in_words_do_not_become_brackets() -> None:
    [text] = make_trees(["( a )"], ["(NP XX XX XX )NP"])
    [tree] = read_trees([text], "silver")
    assert tree.words == ("-LRB-", "a", "-RRB-")
