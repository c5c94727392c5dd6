"""Number words: the two sides of a pair tell the same number, and no split sees another's."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from num2words import num2words

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import SOURCES
from transformer_jax.data.numberwords import NumberWords
from transformer_jax.data.splits import SPLITS, Split

UNITS = {
    language: {
        num2words(number, lang=language): number for number in [*range(20), *range(20, 100, 10)]
    }
    for language in ("en", "de")
}
GERMAN = UNITS["de"] | {"ein": 1}


def english(words: str) -> int:
    """Read an English number: the other way round than the corpus makes it."""
    total = group = 0
    for word in re.split(r"[ -]|, ", words.replace(" and ", " ")):
        if word == "thousand":
            total, group = group * 1000, 0
        elif word == "hundred":
            group *= 100
        else:
            group += UNITS["en"][word]
    return total + group


def german(word: str) -> int:
    """Read a German number, which is one word: 231 is two-hundred-one-and-thirty."""
    if word in GERMAN:
        return GERMAN[word]
    for part, value in (("tausend", 1000), ("hundert", 100)):
        if part in word:
            before, after = word.split(part)
            return (german(before) if before else 1) * value + (german(after) if after else 0)
    unit, ten = word.split("und")
    return german(unit) + german(ten)


def pairs(split: Split, train_pairs: int = 300) -> list[tuple[str, str]]:
    return list(NumberWords(train_pairs).read(split))


def test_the_readers_of_this_test_can_read() -> None:
    assert english("two hundred and thirty-one") == german("zweihunderteinunddreißig") == 231
    assert english("zero") == german("null") == 0
    assert english("one thousand and one") == german("eintausendeins") == 1001
    assert english("nine hundred thousand, two hundred") == german("neunhunderttausendzweihundert")


@pytest.mark.parametrize("split", SPLITS)
def test_both_sides_tell_the_same_number_in_words_only(split: Split) -> None:
    for source, target in pairs(split):
        assert english(source) == german(target)
        assert 0 <= english(source) < 1_000_000
        assert re.fullmatch(r"[a-z]+((-|, | )[a-z]+)*", source)
        assert re.fullmatch(r"[a-zäöüß]+", target)


def test_splits_have_their_sizes_and_share_no_number() -> None:
    numbers = [english(source) for split in SPLITS for source, _ in pairs(split)]
    assert [len(pairs(split)) for split in SPLITS] == [300, 500, 1000]
    assert len(numbers) == len(set(numbers)) == 1800


def test_held_out_lines_stay_the_same_however_many_pairs_are_trained_on() -> None:
    for split in ("dev", "test"):
        assert pairs(split, 1) == pairs(split, 300) == pairs(split, 500_000)
    # More pairs begin with the fewer ones.
    assert pairs("train", 100) == pairs("train", 300)[:100]


def test_the_most_pairs_that_a_config_allows_are_there() -> None:
    corpus = SOURCES["embedded"](DataConfig(num_pairs=500_000))
    assert isinstance(corpus, NumberWords)
    held_out = corpus.test_pairs + corpus.dev_pairs
    assert corpus.train_pairs == 500_000 <= 1_000_000 - held_out


def test_another_process_reads_the_same_lines(tmp_path: Path) -> None:
    code = (
        "import hashlib, json\n"
        "from transformer_jax.data.numberwords import NumberWords\n"
        "from transformer_jax.data.splits import SPLITS\n"
        "lines = [list(NumberWords(300).read(split)) for split in SPLITS]\n"
        "print(hashlib.sha256(json.dumps(lines).encode()).hexdigest())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    here = json.dumps([pairs(split) for split in SPLITS]).encode()
    assert ended.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_an_identity_tells_one_text_from_another() -> None:
    assert NumberWords(300).identity == NumberWords(300).identity
    assert NumberWords(300).identity != NumberWords(301).identity
