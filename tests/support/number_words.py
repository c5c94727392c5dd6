"""Read number words, and measure how many of them a model translates correctly."""

import random
import re
from collections.abc import Iterable, Iterator

from num2words import num2words

from transformer_jax.inference.trained_run import Run

UNITS = {
    language: {
        num2words(number, lang=language): number for number in [*range(20), *range(20, 100, 10)]
    }
    for language in ("en", "de")
}
QUOTED = re.compile(r"""(['"])([a-z ,-]+)\1""")


def english(words: str) -> int:
    """Parse an English number."""
    total = group = 0
    for word in re.split(r"[ -]|, ", words.replace(" and ", " ")):
        if word == "thousand":
            total, group = group * 1000, 0
        elif word == "hundred":
            group *= 100
        else:
            group += UNITS["en"][word]
    return total + group


def quoted_numbers(text: str) -> Iterator[int]:
    """Yield the English numbers in quotation marks, such as 'forty-two'."""
    for _, words in QUOTED.findall(text):
        try:
            number = english(words)
        except KeyError:
            continue
        if num2words(number, lang="en") == words:
            yield number


def wrong_translations(run: Run, numbers: Iterable[int]) -> dict[str, str]:
    """Return the wrong translations of these numbers into German."""
    pairs = [(num2words(number, lang="en"), num2words(number, lang="de")) for number in numbers]
    translations = run.translate([source for source, _ in pairs])
    return {x: y for (x, right), y in zip(pairs, translations, strict=True) if y != right}


def fractions_right_by_digits(run: Run) -> dict[int, float]:
    """Return the fraction of correct translations for each digit count.

    The numbers with up to three digits are all numbers from 1 to 999. The others are 1,000 random
    numbers of each digit count.
    """
    rng = random.Random(1)
    numbers = {3: range(1, 1000)} | {
        d: rng.sample(range(10 ** (d - 1), 10**d), 1000) for d in (4, 5, 6)
    }
    return {d: 1 - len(wrong_translations(run, x)) / len(x) for d, x in numbers.items()}
