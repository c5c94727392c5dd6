"""A built-in corpus: numbers in English and German words. It needs no files and no network."""

import functools
import random
from collections.abc import Iterator

from num2words import num2words

from transformer_jax.data.splits import SPLITS, Split

# English numbers can contain commas, as "nine hundred thousand, two hundred" does.
SEPARATOR = "; "


class NumberWords:
    """Numbers below a million in English and German words.

    The corpus is small but poses real problems of translation: 231 is "two hundred and thirty-one"
    and "zweihunderteinunddreißig", so in German the words move, merge, and inflect.
    """

    splits = SPLITS
    test_pairs = 1000
    dev_pairs = 500

    def __init__(
        self, train_pairs: int, max_numbers_per_line: int = 1, max_digits: int | None = None
    ) -> None:
        """Describe the corpus.

        Args:
            train_pairs: number of training pairs.
            max_numbers_per_line: lines cycle through 1, 2, ..., `max_numbers_per_line` numbers,
                separated by semicolons, so all counts are equally frequent.
            max_digits: each number has 1 to `max_digits` digits, all equally likely, so that a line
                of many numbers can be short. A line that already exists is drawn again. If None, no
                number occurs twice, and most numbers have six digits.
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
        """Return the number of pairs in a split."""
        return {"train": self.train_pairs, "dev": self.dev_pairs, "test": self.test_pairs}[split]

    def read(self, split: Split, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the English line and the German line of each pair, starting at pair `start`."""
        # Training lines come last, so test and dev do not depend on the number of training pairs.
        order: tuple[Split, ...] = ("test", "dev", "train")
        first = sum(self.count(earlier) for earlier in order[: order.index(split)])
        for line in range(first + start, first + self.count(split)):
            sides = zip(*map(_spell, self._numbers(line)), strict=True)
            source, target = (SEPARATOR.join(words) for words in sides)
            yield source, target

    def _numbers(self, line: int) -> tuple[int, ...]:
        most = self.max_numbers_per_line
        if self.max_digits is not None:
            num_lines = self.train_pairs + self.dev_pairs + self.test_pairs
            return _draw_lines(num_lines, most, self.max_digits)[line]
        # Each line reserves `most` numbers, and a line with fewer leaves the rest unused.
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
