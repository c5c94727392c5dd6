"""The embedded corpus: numbers in English and German words; no files, no network."""

import functools
import random
from collections.abc import Iterator

from num2words import num2words

from transformer_jax.data.splits import SPLITS, Split

# English numbers hold commas: "nine hundred thousand, two hundred" is one of them.
BETWEEN = "; "


class NumberWords:
    """Numbers below a million in English and German words.

    A small language of its own, and a real one: 231 is "two hundred and thirty-one" and
    "zweihunderteinunddreißig", so words move, merge and inflect.
    """

    splits = SPLITS
    test_pairs = 1000
    dev_pairs = 500

    def __init__(self, train_pairs: int, numbers_per_line: int = 1) -> None:
        """Choose how many pairs to train on, and how many numbers a line has at most.

        Lines have 1, 2, 3, ... numbers, parted by semicolons, and again: of every length there
        are as many. No number is in two lines.
        """
        self.train_pairs = train_pairs
        self.numbers_per_line = numbers_per_line
        self.name = f"number words, en-de, {train_pairs}"
        if numbers_per_line > 1:
            self.name += f", up to {numbers_per_line} in a line"
        self.identity = self.name

    def count(self, split: Split) -> int:
        return {"train": self.train_pairs, "dev": self.dev_pairs, "test": self.test_pairs}[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        # A test line stays one, however many pairs are trained on.
        order: tuple[Split, ...] = ("test", "dev", "train")
        first = sum(self.count(before) for before in order[: order.index(split)])
        most = self.numbers_per_line
        for line in range(first + start, first + self.count(split)):
            # Each line has so many numbers of its own, of which a short one leaves some unused.
            numbers = _shuffled_numbers()[line * most : line * most + line % most + 1]
            sides = zip(*map(_in_words, numbers), strict=True)
            source, target = (BETWEEN.join(words) for words in sides)
            yield source, target


@functools.cache
def _in_words(number: int) -> tuple[str, str]:
    return num2words(number, lang="en"), num2words(number, lang="de")


@functools.cache
def _shuffled_numbers() -> tuple[int, ...]:
    numbers = list(range(1_000_000))
    random.Random(0).shuffle(numbers)  # noqa: S311 - a fixed order, no secret
    return tuple(numbers)
