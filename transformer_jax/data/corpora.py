"""Where parallel text comes from (section 5.1).

A corpus is anything that reads its splits as pairs of lines; `SOURCES` names the kinds that a
config can ask for.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from num2words import num2words

from transformer_jax.config import DataConfig

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


class Corpus(Protocol):
    """Parallel text in three splits without overlap."""

    @property
    def identity(self) -> str:
        """Tell this text from any other: the same identity, the same lines."""
        ...

    @property
    def bleu_tokenizer(self) -> str:
        """How sacreBLEU shall part its targets into words: a name of sacreBLEU's."""
        ...

    def read(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yield the source line and target line of each pair, in a fixed order."""
        ...


class NumberWords:
    """Numbers below a million in English and German words; no files, no network.

    A small language of its own, and a real one: 231 is "two hundred and thirty-one" and
    "zweihunderteinunddreißig", so words move, merge and inflect.
    """

    test_pairs = 1000
    dev_pairs = 500
    # A German number is one word, in which BLEU would find no two words in a row.
    bleu_tokenizer = "char"

    def __init__(self, train_pairs: int) -> None:
        self.train_pairs = train_pairs

    @property
    def identity(self) -> str:
        return f"number words, en-de, {self.train_pairs}"

    def read(self, split: Split) -> Iterator[tuple[str, str]]:
        # A test line stays one, however many pairs are trained on.
        sizes = {"test": self.test_pairs, "dev": self.dev_pairs, "train": self.train_pairs}
        names = list(sizes)
        start = sum(sizes[name] for name in names[: names.index(split)])
        for number in _shuffled_numbers()[start : start + sizes[split]]:
            yield _in_words(number)


@functools.cache
def _in_words(number: int) -> tuple[str, str]:
    return num2words(number, lang="en"), num2words(number, lang="de")


@functools.cache
def _shuffled_numbers() -> tuple[int, ...]:
    numbers = list(range(1_000_000))
    random.Random(0).shuffle(numbers)  # noqa: S311 - a fixed order, no secret
    return tuple(numbers)


SOURCES: dict[str, Callable[[DataConfig], Corpus]] = {
    "embedded": lambda config: NumberWords(config.num_pairs),
}
