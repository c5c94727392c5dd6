"""The embedded corpus: numbers in English and German words; no files, no network."""

import functools
import random
from collections.abc import Iterator

from num2words import num2words

from transformer_jax.data.splits import SPLITS, Split


class NumberWords:
    """Numbers below a million in English and German words.

    A small language of its own, and a real one: 231 is "two hundred and thirty-one" and
    "zweihunderteinunddreißig", so words move, merge and inflect.
    """

    splits = SPLITS
    test_pairs = 1000
    dev_pairs = 500

    def __init__(self, train_pairs: int) -> None:
        self.train_pairs = train_pairs
        self.name = self.identity = f"number words, en-de, {train_pairs}"

    def count(self, split: Split) -> int:
        return {"train": self.train_pairs, "dev": self.dev_pairs, "test": self.test_pairs}[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        # A test line stays one, however many pairs are trained on.
        order: tuple[Split, ...] = ("test", "dev", "train")
        first = sum(self.count(before) for before in order[: order.index(split)])
        for number in _shuffled_numbers()[first + start : first + self.count(split)]:
            yield _in_words(number)


@functools.cache
def _in_words(number: int) -> tuple[str, str]:
    return num2words(number, lang="en"), num2words(number, lang="de")


@functools.cache
def _shuffled_numbers() -> tuple[int, ...]:
    numbers = list(range(1_000_000))
    random.Random(0).shuffle(numbers)  # noqa: S311 - a fixed order, no secret
    return tuple(numbers)
