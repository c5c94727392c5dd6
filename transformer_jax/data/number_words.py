"""A built-in corpus of numbers spelled out in English and German, which needs no files."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from num2words import num2words

from transformer_jax.data.splits import SPLITS, Split

# English numbers can contain commas: 900,200 is nine hundred thousand, two hundred.
SEPARATOR = "; "
# For each training number of 1,000 or more, the number of digits below the thousands, without
# leading zeros, is drawn from this tuple. If all numbers were equally likely, "ten thousand and
# one" would be too rare to learn.
LAST_DIGITS = (0, 1, 2, 3, 3, 3)


@dataclass(frozen=True)
class NumberWords:
    """Numbers below a million, spelled out in English and German.

    The corpus is small but poses real translation problems: 231 is "two hundred and thirty-one" and
    "zweihunderteinunddreißig", so German reorders, merges, and inflects the words. Successive lines
    contain 1, 2, ..., `max_numbers_per_line` numbers, and then the cycle repeats.

    If `max_digits` is None, all numbers below a million are equally likely, and no number occurs
    twice. Otherwise, all digit counts are equally likely in training. Few numbers are short, so
    numbers repeat:

    - If each line contains one number, training lines repeat short numbers, but they never contain
      a number from the test or dev split.
    - If lines contain several numbers, no line occurs twice, but training lines can contain numbers
      from the test or dev split.
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
            if most == 1:
                held_out = self.test_pairs + self.dev_pairs
                return (_draw_numbers(num_lines, held_out, self.max_digits)[line],)
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


def count_digits(words: str) -> int:
    """Return the number of digits of a number in an English line of the corpus."""
    thousands, is_large, _ = words.rpartition(" thousand")
    if is_large:
        return count_digits(thousands) + 3
    return 3 if " hundred" in words else len(str(_numbers_below_100()[words]))


@functools.cache
def _numbers_below_100() -> dict[str, int]:
    return {_spell(number)[0]: number for number in range(100)}


@functools.lru_cache(maxsize=2)
def _draw_numbers(num_lines: int, num_held_out: int, max_digits: int) -> tuple[int, ...]:
    """Draw the numbers for all lines: distinct held-out numbers, and then training numbers.

    15% of the numbers with up to three digits are held out, and equally many of each larger digit
    count. Two thirds of those with each digit count form the test set.
    """
    rng = random.Random(0)  # noqa: S311 - a fixed order, not a secret
    held_out: list[int] = []
    for digits in range(1, max_digits + 1):
        numbers = _numbers_with(digits)
        share = (num_held_out - len(held_out)) // (max_digits - digits + 1)
        held_out += rng.sample(numbers, min(share, len(numbers) * 3 // 20))
    test, dev = [*held_out[::3], *held_out[1::3]], held_out[2::3]
    rng.shuffle(test)
    rng.shuffle(dev)
    lines, excluded = [*test, *dev], {*held_out}
    while len(lines) < num_lines:
        digits = (len(lines) - num_held_out) % max_digits + 1
        number = _draw_training_number(rng, digits)
        if number not in excluded and len(str(number)) == digits:
            lines.append(number)
    return tuple(lines)


def _draw_training_number(rng: random.Random, digits: int) -> int:
    """Draw a number with this many digits, or with fewer if its thousands are zero."""
    if digits <= 3:
        return rng.choice(_numbers_with(digits))
    last = rng.choice(LAST_DIGITS)
    thousands = _draw_training_number(rng, digits - 3)
    return 1000 * thousands + (rng.randrange(10 ** (last - 1), 10**last) if last else 0)


def _numbers_with(digits: int) -> range:
    return range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


@functools.lru_cache(maxsize=2)
def _draw_lines(num_lines: int, max_numbers: int, max_digits: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(0)  # noqa: S311 - a fixed order, not a secret
    lines: dict[tuple[int, ...], None] = {}
    while len(lines) < num_lines:
        digits = (rng.randint(1, max_digits) for _ in range(len(lines) % max_numbers + 1))
        lines[tuple(rng.choice(_numbers_with(count)) for count in digits)] = None
    return tuple(lines)
