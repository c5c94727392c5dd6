"""Lines become pieces and the very lines again; the same text gives the same model."""

import io
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import Split
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import DataError
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN


def lines(split: Split) -> list[str]:
    return [line for pair in NumberWords(300).read(split) for line in pair]


TRAINING = lines("train")
ALPHABET = sorted(set("".join(TRAINING)) - {" "})
TOKENIZER = Tokenizer.train(TRAINING, 256)


def test_held_out_lines_come_back() -> None:
    held_out = lines("dev")
    pieces = TOKENIZER.encode(held_out)
    assert TOKENIZER.decode(pieces) == held_out
    assert all(row[-1] == EOS for row in pieces)
    assert all(UNKNOWN < piece < 256 for row in pieces for piece in row[:-1])


@given(st.lists(st.text(st.sampled_from(ALPHABET), min_size=1)))
@settings(deadline=None, derandomize=True)
def test_any_words_of_known_letters_come_back(words: list[str]) -> None:
    line = " ".join(words)
    (pieces,) = TOKENIZER.encode([line])
    assert pieces[-1] == EOS
    assert not {PAD, BOS, EOS, UNKNOWN} & set(pieces[:-1])
    assert TOKENIZER.decode([pieces]) == [line]


def as_documented(line: str, known: set[str]) -> str:
    """Return the line as the tokenizer's module says that it comes back."""
    line = re.sub(" +", " ", line).replace("\u2581", " ").strip(" ")
    runs = itertools.groupby(line, key=known.__contains__)
    return "".join("".join(run) if is_known else " \u2047 " for is_known, run in runs)


# Letters of the text, all that looks like a space or is special, and anything else.
FUZZ = [
    *ALPHABET,
    *" \u2581\t\u00a0\u3000\u2047\u2585\0\r\x85\u2028\ufeff日",
    "  ",
    "</s>",
    "<unk>",
]


def fuzz(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        anything = (rng.randrange(0xD800) for _ in range(rng.randrange(4)))
        parts = [*rng.choices(FUZZ, k=rng.randrange(40)), *map(chr, anything)]
        rng.shuffle(parts)
        yield "".join(parts)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_line_comes_back_as_documented(count: int) -> None:
    known = {*ALPHABET, " "}
    lines = list(fuzz(count, seed=count))
    back = TOKENIZER.decode(TOKENIZER.encode(lines))
    assert back == [as_documented(line, known) for line in lines]
    assert len(set(back)) > count // 2


@pytest.mark.parametrize("error", [DataError("told"), OSError(5, "told"), KeyboardInterrupt()])
def test_what_the_lines_raise_while_they_are_learnt_from_is_raised(error: BaseException) -> None:
    def broken() -> Iterator[str]:
        yield from TRAINING[:9]
        raise error

    with pytest.raises(type(error)) as told:
        Tokenizer.train(broken(), 256)
    assert told.value is error


def test_text_is_left_as_it_is_but_for_spaces() -> None:
    # Unicode's normal forms and lower case would change each of these.
    odd = ["Straße", "ﬁnd", "½", "\uff21\uff22", "e\u0301", "é", "…", "I\u0307"]
    tokenizer = Tokenizer.train(odd, 100)
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert tokenizer.decode(tokenizer.encode(["  é   ½ "])) == ["é ½"]


def test_a_letter_that_was_never_seen_is_unknown() -> None:
    (pieces,) = TOKENIZER.encode(["日"])
    assert UNKNOWN in pieces


def test_lines_may_come_in_any_number() -> None:
    assert TOKENIZER.encode([]) == []
    assert TOKENIZER.encode([""]) == [[EOS]]
    assert TOKENIZER.encode(["one", "two"]) == TOKENIZER.encode(["one"]) + TOKENIZER.encode(["two"])


def test_decoding_drops_padding_begin_and_end() -> None:
    (pieces,) = TOKENIZER.encode(["twenty-one"])
    assert TOKENIZER.decode([[BOS, *pieces, PAD, PAD], [PAD, *pieces], [EOS, PAD], []]) == [
        "twenty-one",
        "twenty-one",
        "",
        "",
    ]


def test_the_same_lines_give_the_same_bytes_again() -> None:
    assert Tokenizer.train(iter(TRAINING), 256).model == TOKENIZER.model
    assert Tokenizer.train(TRAINING[1:], 256).model != TOKENIZER.model


def test_the_same_lines_give_the_same_bytes_for_anyone_anywhere(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from transformer_jax.data.number_words import NumberWords\n"
        "from transformer_jax.data.tokenizer import Tokenizer\n"
        "lines = (line for pair in NumberWords(300).read('train') for line in pair)\n"
        "sys.stdout.buffer.write(Tokenizer.learn(lines, 256).model)\n"
    )
    home = tmp_path / "somebody"
    home.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=home,
        env={**os.environ, "HOME": str(home), "USER": "somebody", "LOGNAME": "somebody"},
        capture_output=True,
        check=True,
    )
    assert ended.stdout == TOKENIZER.model
    for word in (b"somebody", str(tmp_path).encode(), str(Path.cwd()).encode()):
        assert word not in ended.stdout


def test_a_digest_tells_one_vocabulary_from_another() -> None:
    again, other = Tokenizer(TOKENIZER.model), Tokenizer.train(TRAINING, 255)
    assert TOKENIZER.digest == again.digest != other.digest
    assert re.fullmatch("[0-9a-f]{64}", TOKENIZER.digest)


def test_a_model_read_from_a_file_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(TOKENIZER.model)
    loaded = Tokenizer.load(path)
    assert loaded.model == TOKENIZER.model
    assert loaded.encode(TRAINING[:9]) == TOKENIZER.encode(TRAINING[:9])


def test_a_vocabulary_has_as_many_pieces_as_asked_or_as_the_text_allows() -> None:
    most = len(Tokenizer.train(TRAINING, 37_000))
    assert 256 < most < 37_000
    assert len(TOKENIZER) == 256
    assert len(Tokenizer.train(TRAINING, most)) == most


def test_a_vocabulary_without_room_for_the_characters_says_how_much_they_need() -> None:
    with pytest.raises(DataError, match=r"data\.vocab_size") as told:
        Tokenizer.train(TRAINING, 8)
    assert "\n" not in str(told.value)
    needed = int(str(told.value).split()[-1])
    # The space is a character too, and four pieces are special.
    assert needed == len(ALPHABET) + 1 + 4
    assert len(Tokenizer.train(TRAINING, needed)) == needed
    with pytest.raises(DataError):
        Tokenizer.train(TRAINING, needed - 1)


@pytest.mark.parametrize("text", [[], [""], ["", ""]])
def test_there_must_be_something_to_learn_from(text: list[str]) -> None:
    with pytest.raises(DataError, match="no vocabulary of 100 pieces") as told:
        Tokenizer.train(text, 100)
    assert "\n" not in str(told.value)


def foreign_model() -> bytes:
    """Return a sound model with SentencePiece's own special pieces, which are not ours."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_writer=model,
        model_type="bpe",
        vocab_size=100,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"no model",
        bytes(range(256)) * 8,
        bytes(1000),
        TOKENIZER.model[:-1],
        TOKENIZER.model[: len(TOKENIZER.model) // 2],
        foreign_model(),
    ],
    ids=["empty", "words", "bytes", "zeros", "without its end", "half", "foreign"],
)
def test_a_model_that_was_not_made_here_is_told_by_name(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    with pytest.raises(DataError) as told:
        Tokenizer.load(path)
    assert str(told.value).startswith(f"{path} ")
    assert "\n" not in str(told.value)
