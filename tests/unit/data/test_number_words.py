"""Test that both sides of a pair spell out the same numbers, and that splits share no line."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from num2words import num2words
from number_words import UNITS, english

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import CORPORA
from transformer_jax.data.number_words import NumberWords, count_digits
from transformer_jax.data.splits import SPLITS, Split

DIGEST = "cc762af9b2b659e7"
GERMAN = UNITS["de"] | {"ein": 1}


def german(word: str) -> int:
    """Parse a German number, which is one word: 231 is "zweihunderteinunddreißig"."""
    if word in GERMAN:
        return GERMAN[word]
    for unit, value in (("tausend", 1000), ("hundert", 100)):
        if unit in word:
            before, after = word.split(unit)
            return (german(before) if before else 1) * value + (german(after) if after else 0)
    ones, tens = word.split("und")
    return german(ones) + german(tens)


def pairs(split: Split, train_pairs: int = 300, most: int = 1) -> list[tuple[str, str]]:
    return list(NumberWords(train_pairs, most).read(split))


def test_the_parsers_in_this_test_are_correct() -> None:
    assert english("two hundred and thirty-one") == german("zweihunderteinunddreißig") == 231
    assert english("zero") == german("null") == 0
    assert english("one thousand and one") == german("eintausendeins") == 1001
    assert english("nine hundred thousand, two hundred") == german("neunhunderttausendzweihundert")


@pytest.mark.parametrize("split", SPLITS)
def test_both_sides_spell_the_same_number_in_words_only(split: Split) -> None:
    for source, target in pairs(split):
        assert english(source) == german(target)
        assert 0 <= english(source) < 1_000_000
        assert re.fullmatch(r"[a-z]+((-|, | )[a-z]+)*", source)
        assert re.fullmatch(r"[a-zäöüß]+", target)


def test_splits_have_the_documented_sizes_and_share_no_number() -> None:
    numbers = [english(source) for split in SPLITS for source, _ in pairs(split)]
    assert [len(pairs(split)) for split in SPLITS] == [300, 500, 1000]
    assert len(numbers) == len(set(numbers)) == 1800


def test_lines_of_several_numbers_spell_the_same_numbers_and_repeat_none() -> None:
    numbers: list[int] = []
    for split in SPLITS:
        sizes = Counter[int]()
        for source, target in pairs(split, most=4):
            line = [english(words) for words in source.split("; ")]
            assert line == [german(word) for word in target.split("; ")]
            sizes[len(line)] += 1
            numbers += line
        # Lines with 1, 2, 3, or 4 numbers are equally frequent.
        assert set(sizes) == {1, 2, 3, 4}
        assert max(sizes.values()) - min(sizes.values()) <= 1
    assert len(numbers) == len(set(numbers)) > 2 * 1800


def test_the_corpus_never_changes() -> None:
    lines = json.dumps([pairs(split) for split in SPLITS]).encode()
    assert hashlib.sha256(lines).hexdigest().startswith(DIGEST), (
        "runs that exist need the old corpus: change it only with a new identity"
    )
    assert NumberWords(300).identity == "number words, en-de, 300"


@pytest.mark.parametrize("most", [1, 3])
def test_lines_can_be_read_from_any_start(most: int) -> None:
    for split in SPLITS:
        lines = pairs(split, 20, most)
        for start in (0, 1, 7, len(lines)):
            assert list(NumberWords(20, most).read(split, start)) == lines[start:]


@pytest.mark.parametrize("most", [1, 3])
def test_held_out_lines_do_not_depend_on_the_number_of_training_pairs(most: int) -> None:
    for split in ("dev", "test"):
        expected = pairs(split, 300, most)
        assert all(pairs(split, n, most) == expected for n in (1, 500_000 // most))
    # A smaller training split is a prefix of a larger one.
    assert pairs("train", 100, most) == pairs("train", 300, most)[:100]


@pytest.mark.parametrize("most", [1, 3, 300])
def test_the_corpus_has_as_many_pairs_as_the_config_allows(most: int) -> None:
    train = 500_000 // most
    corpus = CORPORA["number_words"](DataConfig(num_pairs=train, max_numbers_per_line=most))
    assert isinstance(corpus, NumberWords)
    # The index of a line determines how many numbers the line contains, even for the last line.
    [(source, _)] = corpus.read("train", train - 1)
    last = train - 1 + corpus.test_pairs + corpus.dev_pairs
    assert len(source.split("; ")) == last % most + 1


@pytest.mark.slow
def test_another_process_reads_the_same_lines(tmp_path: Path) -> None:
    code = (
        "import hashlib, json\n"
        "from transformer_jax.data.number_words import NumberWords\n"
        "from transformer_jax.data.splits import SPLITS\n"
        "lines = [list(NumberWords(300).read(split)) for split in SPLITS]\n"
        "print(hashlib.sha256(json.dumps(lines).encode()).hexdigest())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    here = json.dumps([pairs(split) for split in SPLITS]).encode()
    assert ended.stdout.strip() == hashlib.sha256(here).hexdigest()


def short_pairs(split: Split, train_pairs: int = 300, most: int = 4) -> list[tuple[str, str]]:
    return list(NumberWords(train_pairs, most, 6).read(split))


def test_max_digits_makes_all_lengths_of_numbers_equally_frequent_and_no_line_twice() -> None:
    lines = [line for split in SPLITS for line in short_pairs(split)]
    assert len(lines) == len(set(lines)) == 1800
    digits = Counter[int]()
    sizes = Counter[int]()
    for source, target in lines:
        numbers = [english(words) for words in source.split("; ")]
        assert numbers == [german(word) for word in target.split("; ")]
        digits.update(len(str(number)) for number in numbers)
        sizes[len(numbers)] += 1
    assert set(sizes.values()) == {450}
    # There are 4,500 numbers: about 750 for each digit count from 1 to 6. Lines that consist of a
    # single digit are rarer, because there are only ten digits.
    assert set(digits) == {1, 2, 3, 4, 5, 6}
    assert all(650 < count < 850 for count in digits.values())


def test_lines_with_max_digits_can_be_read_from_any_start_and_never_change() -> None:
    for split in SPLITS:
        lines = short_pairs(split)
        assert list(NumberWords(300, 4, 6).read(split, 7)) == lines[7:]
        assert short_pairs(split, 900)[: len(lines)] == lines
    assert len({NumberWords(300, 4, digits).identity for digits in (None, 5, 6)}) == 3


@pytest.mark.parametrize("digits", [5, 6])
def test_single_numbers_with_max_digits_are_held_out_and_all_lengths_are_trained(
    digits: int,
) -> None:
    corpus = NumberWords(3000, 1, digits)
    test, dev, train = ([english(x) for x, _ in corpus.read(s)] for s in ("test", "dev", "train"))
    held_out = {*test, *dev}
    assert (len(test), len(dev), len(held_out), len(train)) == (1000, 500, 1500, 3000)
    assert not held_out & {*train}
    counts = Counter(len(str(number)) for number in train)
    assert counts == dict.fromkeys(range(1, digits + 1), 3000 // digits)
    # Every digit occurs in training, unless it is held out.
    assert {*range(10)} - held_out == {number for number in train if number < 10}
    # Half of the large numbers end in three digits after the thousands, and a sixth in 000.
    ends = Counter(len(str(number % 1000).lstrip("0")) for number in train if number > 999)
    for digits_at_end, share in ((3, 1 / 2), (2, 1 / 6), (1, 1 / 6), (0, 1 / 6)):
        assert abs(ends[digits_at_end] / ends.total() - share) < 0.05
    shares = Counter(len(str(number)) for number in test)
    assert [shares[1], shares[2], shares[3]] == [1, 9, 90]
    assert max(shares.values()) - min(shares[n] for n in range(4, digits + 1)) <= 1
    assert list(NumberWords(100, 1, digits).read("train")) == list(corpus.read("train"))[:100]
    assert list(NumberWords(100, 1, digits).read("test")) == list(corpus.read("test"))
    for split in SPLITS:
        assert list(corpus.read(split, 7)) == list(corpus.read(split))[7:]


def test_digits_are_counted_in_english_words() -> None:
    for number in (*range(1200), *range(1200, 1_000_000, 997), 100_000, 999_999):
        assert count_digits(num2words(number, lang="en")) == len(str(number))


@pytest.mark.parametrize(("most", "digits"), [(1, 5), (2, 5), (3, 6)])
def test_the_corpus_with_max_digits_has_as_many_pairs_as_the_config_allows(
    most: int, digits: int
) -> None:
    distinct = 10**digits // 4 * most - 1500
    train = min(distinct, 500_000 // most) if most > 1 else 500_000
    config = DataConfig(num_pairs=train, max_numbers_per_line=most, max_digits=digits)
    [(source, _)] = CORPORA["number_words"](config).read("train", train - 1)
    assert len(source.split("; ")) == (train + 1499) % most + 1


def test_different_corpora_have_different_identities() -> None:
    assert NumberWords(300).identity == NumberWords(300).identity
    assert NumberWords(300).identity != NumberWords(301).identity
    assert len({NumberWords(300, most).identity for most in (1, 2, 3)}) == 3
