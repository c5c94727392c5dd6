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

    def __init__(
        self, train_pairs: int, max_numbers_per_line: int = 1, max_digits: int | None = None
    ) -> None:
        """Choose how many pairs to train on, and how many numbers a line has at most.

        Lines have 1, 2, 3, ... numbers, parted by semicolons, and again: of every length there
        are as many. No number is in two lines.

        With `max_digits`, each number is drawn with 1 to so many digits, all equally likely,
        so that a line of many numbers can be short. A line that is there already is drawn again:
        lines of one number are mostly long.
        """
        self.train_pairs = train_pairs
        self.max_numbers_per_line = max_numbers_per_line
        self.max_digits = max_digits
        self.name = f"number words, en-de, {train_pairs}"
        if max_numbers_per_line > 1:
            self.name += f", up to {max_numbers_per_line} in a line"
        if max_digits is not None:
            self.name += f", of up to {max_digits} digits"
        self.identity = self.name

    def count(self, split: Split) -> int:
        return {"train": self.train_pairs, "dev": self.dev_pairs, "test": self.test_pairs}[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        # A test line stays one, however many pairs are trained on.
        order: tuple[Split, ...] = ("test", "dev", "train")
        first = sum(self.count(before) for before in order[: order.index(split)])
        for line in range(first + start, first + self.count(split)):
            sides = zip(*map(_in_words, self._numbers(line)), strict=True)
            source, target = (BETWEEN.join(words) for words in sides)
            yield source, target

    def _numbers(self, line: int) -> tuple[int, ...]:
        most, digits = self.max_numbers_per_line, self.max_digits
        if digits is not None:
            lines = self.train_pairs + self.dev_pairs + self.test_pairs
            return _drawn_lines(lines, most, digits)[line]
        # Each line has so many numbers of its own, of which a short one leaves some unused.
        return _shuffled_numbers()[line * most : line * most + line % most + 1]


@functools.cache
def _in_words(number: int) -> tuple[str, str]:
    return num2words(number, lang="en"), num2words(number, lang="de")


@functools.cache
def _shuffled_numbers() -> tuple[int, ...]:
    numbers = list(range(1_000_000))
    random.Random(0).shuffle(numbers)  # noqa: S311 - a fixed order, no secret
    return tuple(numbers)


@functools.lru_cache(maxsize=2)
def _drawn_lines(count: int, most: int, digits: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(0)  # noqa: S311 - a fixed order, no secret
    lines: dict[tuple[int, ...], None] = {}

    def drawn() -> int:
        length = rng.randint(1, digits)
        return rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)

    while len(lines) < count:
        lines[tuple(drawn() for _ in range(len(lines) % most + 1))] = None
    return tuple(lines)
