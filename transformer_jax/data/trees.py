"""Constituency trees in the bracketed format of the Penn Treebank.

A tree in this format can span several lines:

    ( (S (NP-SBJ (PRP It)) (VP (VBZ works)) (. .)) )

The reader removes everything that parsers do not predict: empty elements (-NONE-) and constituents
that contain nothing else, function tags (NP-SBJ becomes NP), and the bracket around the whole tree
if its label is in `TOP_LABELS`. If a word contains spaces, as in (NN Xpd TTD), the reader replaces
them with underscores: Xpd_TTD.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from transformer_jax.errors import DataError

# A no-break space can occur inside a word.
SYMBOL = re.compile(r"[()]|[^() \t\r\n]+")
EMPTY_ELEMENT = "-NONE-"
# Possible labels for the bracket around the whole tree. In the Penn Treebank, this bracket has no
# label.
TOP_LABELS = ("", "TOP", "ROOT", "S1")


class Bracket(NamedTuple):
    """A constituent: its label and the range of words that it covers."""

    label: str
    start: int
    """The index of the first word."""
    end: int
    """One more than the index of the last word."""


class Tree(NamedTuple):
    """A tree as flat sequences, with brackets in the order in which they open."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    """The part-of-speech tag of each word."""
    brackets: tuple[Bracket, ...]


@dataclass
class _Node:
    """A bracket that is still open."""

    line: int
    """The line number of the opening parenthesis."""
    start: int
    label: str | None = None
    word: str | None = None
    slot: int | None = None
    """The index of this bracket in `_Builder.brackets`, or None until it has a child bracket."""


@dataclass
class _Builder:
    """The words, tags, and brackets of the current tree, and a stack of its open brackets."""

    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    brackets: list[Bracket | None] = field(default_factory=list)
    """The brackets in the order in which they open; None if one is still open or was removed."""
    open: list[_Node] = field(default_factory=list)

    def add(self, symbol: str, line: int) -> None:
        """Add a parenthesis, label, or word; raise ValueError if it is invalid at this point."""
        if symbol == "(":
            self._open_bracket(line)
        elif not self.open:
            raise ValueError(f"{symbol!r} is outside of all brackets")
        elif symbol == ")":
            self._close_bracket(self.open.pop())
        else:
            node = self.open[-1]
            if node.slot is not None:
                raise ValueError(f"the word {symbol!r} follows a bracket, not a label")
            if node.label is None:
                node.label = symbol
            else:
                node.word = symbol if node.word is None else f"{node.word}_{symbol}"

    def _open_bracket(self, line: int) -> None:
        if self.open:
            parent = self.open[-1]
            if parent.word is not None:
                raise ValueError(f"a bracket follows the word {parent.word!r}")
            if parent.label is None:
                if len(self.open) > 1:
                    raise ValueError("a bracket has no label")
                parent.label = ""
            if parent.slot is None:
                parent.slot = len(self.brackets)
                self.brackets.append(None)
        self.open.append(_Node(line, len(self.words)))

    def _close_bracket(self, node: _Node) -> None:
        if node.word is not None and node.label is not None:
            if node.label != EMPTY_ELEMENT:
                self.words.append(node.word)
                self.tags.append(node.label)
        elif node.slot is None or node.label is None:
            raise ValueError(f"the bracket ({node.label or ''}) has no words")
        elif node.start < len(self.words) and (self.open or node.label not in TOP_LABELS):
            label = strip_function_tags(node.label)
            self.brackets[node.slot] = Bracket(label, node.start, len(self.words))

    def build(self) -> Tree:
        """Return the tree; raise ValueError if it has no words."""
        if not self.words:
            raise ValueError("a tree has no words, or only empty elements")
        brackets = (bracket for bracket in self.brackets if bracket is not None)
        return Tree(tuple(self.words), tuple(self.tags), tuple(brackets))


def strip_function_tags(label: str) -> str:
    """Return a constituent's category: NP for NP-SBJ-1 and NP=2."""
    return re.split("[-=]", label, maxsplit=1)[0] or label


def read_trees(lines: Iterable[str], name: str, *, one_per_line: bool = False) -> Iterator[Tree]:
    """Yield the trees in bracketed text, in which blank lines are ignored.

    With `one_per_line`, each nonblank line must contain exactly one tree. The message of a
    DataError begins with `name` and the line number.
    """
    builder, number = _Builder(), 0
    for number, line in enumerate(lines, start=1):
        num_trees = 0
        try:
            for symbol in SYMBOL.findall(line):
                builder.add(symbol, number)
                if not builder.open:
                    num_trees += 1
                    if one_per_line and num_trees > 1:
                        raise ValueError("there is more than one tree")
                    yield builder.build()
                    builder = _Builder()
            if one_per_line and builder.open:
                raise ValueError("the tree is incomplete: a closing bracket is missing")
        except ValueError as error:
            raise DataError(f"{name}, line {number}: {error}") from error
    if builder.open:
        first = builder.open[0].line
        raise DataError(f"{name}, line {first}: the tree that begins here is never closed")
