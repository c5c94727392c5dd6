"""A built-in corpus of numbers spelled out in English and German.

The corpus needs no files or network access.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from num2words import num2words

from transformer_jax.data.splits import SPLITS, Split

# English numbers can contain commas, as in "nine hundred thousand, two hundred".
SEPARATOR = "; "


@dataclass(frozen=True)
class NumberWords:
    """Numbers below a million, spelled out in English and German.

    The corpus is small but poses real translation problems: 231 is "two hundred and thirty-one" and
    "zweihunderteinunddreißig", so German reorders, merges, and inflects the words. Successive lines
    contain 1, 2, ..., `max_numbers_per_line` numbers, and then the cycle repeats. If `max_digits`
    is None, no number occurs twice.
    """

    splits = SPLITS
    test_pairs = 1000
    dev_pairs = 500
    train_pairs: int
    max_numbers_per_line: int = 1
    max_digits: int | None = None

    @property
    def name(self) -> str:
        """A human-readable name that also identifies the text."""
        most, digits = self.max_numbers_per_line, self.max_digits
        name = f"number words, en-de, {self.train_pairs}"
        name += f", up to {most} in a line" if most > 1 else ""
        return name if digits is None else f"{name}, of up to {digits} digits"

    identity = name

    def count(self, split: Split) -> int:
        """Return the number of pairs in a split."""
        return {"train": self.train_pairs, "dev": self.dev_pairs, "test": self.test_pairs}[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the English and German lines of each pair, starting at pair `start`."""
        # Training lines come last, so the test and dev lines do not depend on `train_pairs`.
        held_out = self.test_pairs + self.dev_pairs
        first = {"test": 0, "dev": self.test_pairs, "train": held_out}[split]
        for line in range(first + start, first + self.count(split)):
            sides = zip(*map(_spell, self._numbers(line)), strict=True)
            source, target = (SEPARATOR.join(words) for words in sides)
            yield source, target

    def _numbers(self, line: int) -> tuple[int, ...]:
        most = self.max_numbers_per_line
        if self.max_digits is not None:
            num_lines = sum(map(self.count, SPLITS))
            return _draw_lines(num_lines, most, self.max_digits)[line]
        # Reserve `most` numbers for each line, even if the line uses fewer.
        return _shuffle_numbers()[line * most : line * most + line % most + 1]


@functools.cache
def _spell(number: int) -> tuple[str, str]:
    return num2words(number, lang="en"), num2words(number, lang="de")


@functools.cache
def _shuffle_numbers() -> tuple[int, ...]:
    numbers = list(range(1_000_000))
    random.Random(0).shuffle(numbers)  # noqa: S311 - a fixed order, not a secret
    return tuple(numbers)


@functools.lru_cache(maxsize=2)
def _draw_lines(num_lines: int, max_numbers: int, max_digits: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(0)  # noqa: S311 - a fixed order, not a secret
    lines: dict[tuple[int, ...], None] = {}

    def draw_number() -> int:
        digits = rng.randint(1, max_digits)
        return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

    while len(lines) < num_lines:
        lines[tuple(draw_number() for _ in range(len(lines) % max_numbers + 1))] = None
    return tuple(lines)
