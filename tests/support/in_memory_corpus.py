"""An in-memory corpus and a small vocabulary."""

import json
from collections.abc import Iterator

import numpy as np
from small import read_pairs

from transformer_jax.data.prepare import Prepared
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary

Pairs = list[tuple[str, str]]

WORDS: Pairs = read_pairs("train")[:50]
TOKENIZER = Tokenizer.train([line for pair in WORDS for line in pair], 100)
VOCABULARY = Vocabulary.share(TOKENIZER)


class InMemoryCorpus:
    """A corpus of the given pairs. Its test split contains the dev pairs in reverse order."""

    name = "lines"
    splits = SPLITS

    def __init__(self, train: Pairs, held_out: Pairs) -> None:
        self._pairs: dict[Split, Pairs] = {
            "train": train,
            "dev": held_out,
            "test": held_out[::-1],
        }
        self.identity = json.dumps(self._pairs)

    def count(self, split: Split) -> int:
        return len(self._pairs[split])

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        yield from self._pairs[split][start:]


def sequences(prepared: Prepared, split: Split) -> list[list[list[int]]]:
    """Return a split's source sequences and target sequences, as lists of tokens."""
    return [
        [tokens.tolist() for tokens in np.split(side.flat, side.offsets[1:-1])]
        for side in prepared.tokens(split)
    ]
