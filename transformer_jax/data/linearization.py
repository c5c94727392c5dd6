"""Trees as sequences of symbols, as in "Grammar as a Foreign Language" (Vinyals et al., 2015).

The parse tree for "It works." becomes `(S (NP XX )NP (VP XX )VP . )S`. Closing brackets also have
labels. XX replaces every part-of-speech tag except punctuation tags, which identify the punctuation
that the scores ignore.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.data.trees import Bracket

# The punctuation tags that evalb ignores with its parameter files COLLINS.prm and new.prm.
PUNCTUATION_TAGS = frozenset({",", ":", "``", "''", ".", "?", "!"})
NORMALIZED_TAG = "XX"


class Parse(NamedTuple):
    """A parsed linearized tree, repaired if necessary."""

    tags: tuple[str, ...]
    """The part-of-speech symbol of each word, such as XX."""
    brackets: tuple[Bracket, ...]
    is_repaired: bool
    """Whether repair was needed to obtain a tree with the right number of words."""


def linearize(tags: Sequence[str], brackets: Sequence[Bracket]) -> str:
    """Return a tree's symbols, given its brackets in the order in which they open."""
    symbols, open_brackets, num_opened = list[str](), list[Bracket](), 0
    for position in range(len(tags) + 1):
        while open_brackets and open_brackets[-1].end == position:
            symbols.append(f"){open_brackets.pop().label}")
        while num_opened < len(brackets) and brackets[num_opened].start == position:
            open_brackets.append(brackets[num_opened])
            symbols.append(f"({brackets[num_opened].label}")
            num_opened += 1
        if position < len(tags):
            tag = tags[position]
            symbols.append(tag if tag in PUNCTUATION_TAGS else NORMALIZED_TAG)
    return " ".join(symbols)


def parse_linearized(line: str, num_words: int) -> Parse:
    """Return the tree that a model produced for a sentence, after repairing it if necessary.

    The repair reads the symbols from left to right:

    1. A closing bracket also closes the brackets inside it. If no open bracket has the same label,
       the closing bracket is dropped.
    2. A bracket without words is dropped.
    3. If there are more word symbols than words, the extra symbols are dropped. If there are fewer
       word symbols than words, the remaining words are added at the end of the outermost bracket.
    4. At the end, all open brackets are closed.
    """
    tags, slots, open_slots = list[str](), list[Bracket | None](), list[_OpenBracket]()
    is_repaired = False
    # A label can contain a no-break space, so split symbols only at ordinary spaces.
    for symbol in filter(None, line.split(" ")):
        if symbol.startswith("(") and symbol != "(":
            open_slots.append(_OpenBracket(len(slots), symbol[1:], len(tags)))
            slots.append(None)
        elif symbol.startswith(")"):
            is_repaired |= not open_slots or open_slots[-1].label != symbol[1:]
            if any(bracket.label == symbol[1:] for bracket in open_slots):
                while open_slots[-1].label != symbol[1:]:
                    open_slots.pop().close(slots, len(tags))
                open_slots.pop().close(slots, len(tags))
        elif len(tags) < num_words:
            tags.append(symbol)
        else:
            is_repaired = True
    num_tags, is_incomplete = len(tags), bool(open_slots)
    tags += [NORMALIZED_TAG] * (num_words - num_tags)
    while open_slots:
        bracket = open_slots.pop()
        # Words without symbols belong to the outermost bracket.
        bracket.close(slots, num_tags if open_slots else num_words)
    brackets = [bracket for bracket in slots if bracket is not None]
    if brackets and not is_incomplete and brackets[0].end == num_tags:
        brackets[0] = brackets[0]._replace(end=num_words)
    is_repaired |= is_incomplete or num_tags < num_words or len(brackets) < len(slots)
    return Parse(tuple(tags), tuple(brackets), is_repaired)


class _OpenBracket(NamedTuple):
    """A bracket that has not been closed yet."""

    index: int
    """The number of brackets that opened before this one."""
    label: str
    start: int

    def close(self, slots: list[Bracket | None], end: int) -> None:
        """If the bracket contains any words, store it in `slots` at its index."""
        if self.start < end:
            slots[self.index] = Bracket(self.label, self.start, end)
