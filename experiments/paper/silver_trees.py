"""Turn a trained parser's output into training trees, for semi-supervised parsing (section 6.3).

    transformer-jax translate runs/parsing < FILE > symbols.txt
    python -m experiments.paper.silver_trees FILE symbols.txt > FOLDER/train/silver.trees

FILE contains a sentence on each line, with words and punctuation separated by spaces. If FOLDER
contains the sections of the Penn Treebank, write the trees to FOLDER/02/silver.trees. Sentences
whose trees needed repair are left out, because the parser is likely to be wrong about them.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformer_jax.data.linearization import Parse, parse_linearized
from transformer_jax.data.trees import Bracket


def to_brackets(words: Sequence[str], parse: Parse) -> str:
    """Return a tree in the bracketed format of the Penn Treebank."""
    parts: list[str] = []
    open_brackets: list[Bracket] = []
    waiting = list(reversed(parse.brackets))
    for position, (word, tag) in enumerate(zip(words, parse.tags, strict=True)):
        while waiting and waiting[-1].start == position:
            open_brackets.append(waiting.pop())
            parts.append(f"({open_brackets[-1].label} ")
        parts.append(f"({tag} {word.replace('(', '-LRB-').replace(')', '-RRB-')})")
        while open_brackets and open_brackets[-1].end == position + 1:
            open_brackets.pop()
            parts.append(")")
    return f"( {''.join(parts)} )"


def make_trees(sentences: Iterable[str], symbols: Iterable[str]) -> Iterator[str]:
    """Yield a tree for each sentence whose symbols form one.

    Raises:
        ValueError: the numbers of lines differ.
    """
    for sentence, line in zip(sentences, symbols, strict=True):
        words = sentence.split()
        parse = parse_linearized(line.strip(), len(words))
        if words and parse.brackets and not parse.is_repaired:
            yield to_brackets(words, parse)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m experiments.paper.silver_trees FILE SYMBOLS")
    # `translate` separates lines only at newlines.
    texts = (Path(name).read_text("utf-8").removesuffix("\n").split("\n") for name in sys.argv[1:])
    sys.stdout.writelines(f"{tree}\n" for tree in make_trees(*texts))
