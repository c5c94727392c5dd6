"""Small corpora: pairs of lines in memory, and a treebank."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from example_configs import read_pairs

from transformer_jax import registry
from transformer_jax.data.number_words import NumberWords
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


def use_corpus(monkeypatch: pytest.MonkeyPatch, corpus: InMemoryCorpus) -> None:
    """Replace the corpus number_words."""
    part = registry.Part(lambda _: corpus, is_foreign=False, file=None)
    monkeypatch.setitem(registry._parts["data.corpus"], "number_words", part)


def sequences(prepared: Prepared, split: Split) -> list[list[list[int]]]:
    """Return a split's source sequences and target sequences, as lists of tokens."""
    return [
        [tokens.tolist() for tokens in np.split(side.flat, side.offsets[1:-1])]
        for side in prepared.tokens(split)
    ]


NOUNS = ("cat", "dog", "bird", "horse", "fish")
VERBS = ("sees", "likes", "hears")


def sentences(count: int, start: int = 0) -> list[str]:
    """Return the trees of short sentences, such as "the dog sees a cat"."""
    trees = []
    for index in range(start, start + count):
        subject, verb = NOUNS[index % 5], VERBS[index // 5 % 3]
        object_ = f" (NP (DT a) (NN {NOUNS[index // 15 % 5]}))" if index % 2 else ""
        trees.append(f"( (S (NP-SBJ (DT the) (NN {subject})) (VP (VBZ {verb}){object_}) (. .)) )")
    return trees


def write_treebank(folder: Path, *, train: int = 60, dev: int = 8, test: int = 8) -> Path:
    """Write a treebank with one file for each nonempty split, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        if count:
            text = "".join(f"{tree}\n" for tree in sentences(count, start))
            (folder / f"{split}.trees").write_text(text)
        start += count
    return folder


def write_multi30k(folder: Path, languages: Sequence[str], *, lines: int = 60) -> None:
    """Write number words to files that have the names of Multi30k's captions."""
    text = folder / "multi30k/tok"
    text.mkdir(parents=True)
    for name, split in (("train", "train"), ("val", "dev"), ("test_2016_flickr", "test")):
        pairs = list(NumberWords(lines).read(split))[:lines]
        # Only the first language is English.
        for number, language in enumerate(languages):
            rows = "".join(f"{pair[min(number, 1)]}\n" for pair in pairs)
            (text / f"{name}.lc.norm.tok.{language}.gz").write_bytes(gzip.compress(rows.encode()))
