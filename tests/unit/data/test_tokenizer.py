"""Test that decoding inverts encoding, and that training is deterministic."""

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


def test_decoding_returns_the_lines_of_held_out_text() -> None:
    held_out = lines("dev")
    tokens = TOKENIZER.encode(held_out)
    assert TOKENIZER.decode(tokens) == held_out
    assert all(sequence[-1] == EOS for sequence in tokens)
    assert all(UNKNOWN < token < 256 for sequence in tokens for token in sequence[:-1])


@given(st.lists(st.text(st.sampled_from(ALPHABET), min_size=1)))
@settings(deadline=None, derandomize=True)
def test_decoding_returns_any_words_of_known_letters(words: list[str]) -> None:
    line = " ".join(words)
    (tokens,) = TOKENIZER.encode([line])
    assert tokens[-1] == EOS
    assert not {PAD, BOS, EOS, UNKNOWN} & set(tokens[:-1])
    assert TOKENIZER.decode([tokens]) == [line]


def as_documented(line: str, known: set[str]) -> str:
    """Simulate encoding and decoding a line, as the tokenizer module's docstring describes."""
    line = re.sub(" +", " ", line).replace("\u2581", " ").strip(" ")
    runs = itertools.groupby(line, key=known.__contains__)
    return "".join("".join(run) if is_known else " \u2047 " for is_known, run in runs)


# Letters from the training text, spaces and their lookalikes, special symbols, and an unknown
# letter.
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


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_decoding_an_encoded_line_returns_the_documented_text(count: int) -> None:
    known = {*ALPHABET, " "}
    lines = list(fuzz(count, seed=count))
    decoded = TOKENIZER.decode(TOKENIZER.encode(lines))
    assert decoded == [as_documented(line, known) for line in lines]
    assert len(set(decoded)) > count // 2


@pytest.mark.parametrize("error", [DataError("broken"), OSError(5, "broken"), KeyboardInterrupt()])
def test_training_raises_the_exception_of_its_lines(error: BaseException) -> None:
    def broken() -> Iterator[str]:
        yield from TRAINING[:9]
        raise error

    with pytest.raises(type(error)) as caught:
        Tokenizer.train(broken(), 256)
    assert caught.value is error


def test_text_is_not_normalized_except_for_spaces() -> None:
    # Unicode normalization or lowercasing would change each of these strings.
    odd = ["Straße", "ﬁnd", "½", "\uff21\uff22", "e\u0301", "é", "…", "I\u0307"]
    tokenizer = Tokenizer.train(odd, 100)
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert tokenizer.decode(tokenizer.encode(["  é   ½ "])) == ["é ½"]


def test_a_letter_outside_the_training_text_is_unknown() -> None:
    (tokens,) = TOKENIZER.encode(["日"])
    assert UNKNOWN in tokens


def test_encoding_several_lines_encodes_each_by_itself() -> None:
    assert TOKENIZER.encode([]) == []
    assert TOKENIZER.encode([""]) == [[EOS]]
    assert TOKENIZER.encode(["one", "two"]) == TOKENIZER.encode(["one"]) + TOKENIZER.encode(["two"])


def test_a_sample_skips_merges_and_is_a_function_of_its_arguments() -> None:
    text = [f"{a} {b}" for a, b in itertools.pairwise(TRAINING[:40])]
    plain = TOKENIZER.encode(text)
    assert TOKENIZER.sample(text, 0.0, seed=1) == plain
    sample = TOKENIZER.sample(text, 0.1, seed=1)
    assert TOKENIZER.decode(sample) == text
    assert TOKENIZER.sample(text, 0.1, seed=1) == sample != TOKENIZER.sample(text, 0.1, seed=2)
    characters = [len(line) + 2 for line in text]  # A "▁" precedes each line, and `EOS` ends it.
    assert [*map(len, TOKENIZER.sample(text, 1.0, seed=1))] == characters
    totals = [sum(map(len, x)) for x in (plain, sample)]
    assert totals[0] < totals[1] < sum(characters)


def test_decoding_drops_padding_bos_and_eos() -> None:
    (tokens,) = TOKENIZER.encode(["twenty-one"])
    assert TOKENIZER.decode([[BOS, *tokens, PAD, PAD], [PAD, *tokens], [EOS, PAD], []]) == [
        "twenty-one",
        "twenty-one",
        "",
        "",
    ]


def test_training_is_deterministic() -> None:
    assert Tokenizer.train(iter(TRAINING), 256).model == TOKENIZER.model
    assert Tokenizer.train(TRAINING[1:], 256).model != TOKENIZER.model


@pytest.mark.slow
def test_the_model_does_not_depend_on_the_user_or_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from transformer_jax.data.number_words import NumberWords\n"
        "from transformer_jax.data.tokenizer import Tokenizer\n"
        "lines = (line for pair in NumberWords(300).read('train') for line in pair)\n"
        "sys.stdout.buffer.write(Tokenizer.train(lines, 256).model)\n"
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


def test_different_vocabularies_have_different_digests() -> None:
    again, other = Tokenizer(TOKENIZER.model), Tokenizer.train(TRAINING, 255)
    assert TOKENIZER.digest == again.digest != other.digest
    assert re.fullmatch("[0-9a-f]{64}", TOKENIZER.digest)


def test_a_model_read_from_bytes_encodes_the_same() -> None:
    loaded = Tokenizer(TOKENIZER.model)
    assert loaded.model == TOKENIZER.model
    assert loaded.encode(TRAINING[:9]) == TOKENIZER.encode(TRAINING[:9])


def test_a_vocabulary_has_the_requested_size_if_the_text_allows_it() -> None:
    largest = len(Tokenizer.train(TRAINING, 37_000))
    assert 256 < largest < 37_000
    assert len(TOKENIZER) == 256
    assert len(Tokenizer.train(TRAINING, largest)) == largest


def test_a_vocabulary_too_small_for_the_characters_is_refused_with_the_size_they_need() -> None:
    with pytest.raises(DataError, match=r"data\.vocab_size") as caught:
        Tokenizer.train(TRAINING, 8)
    assert "\n" not in str(caught.value)
    needed = int(str(caught.value).split()[-1])
    # The vocabulary also needs the space character and four special tokens.
    assert needed == len(ALPHABET) + 1 + 4
    assert len(Tokenizer.train(TRAINING, needed)) == needed
    with pytest.raises(DataError):
        Tokenizer.train(TRAINING, needed - 1)


@pytest.mark.parametrize("text", [[], [""], ["", ""]])
def test_training_on_empty_text_is_refused(text: list[str]) -> None:
    with pytest.raises(DataError, match="cannot train a vocabulary of 100 tokens") as caught:
        Tokenizer.train(text, 100)
    assert "\n" not in str(caught.value)


def foreign_model() -> bytes:
    """Return a valid SentencePiece model whose special tokens differ from this package's."""
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
        b"not a model",
        bytes(range(256)) * 8,
        bytes(1000),
        TOKENIZER.model[:-1],
        TOKENIZER.model[: len(TOKENIZER.model) // 2],
        foreign_model(),
    ],
    ids=["empty", "words", "bytes", "zeros", "truncated", "half", "foreign"],
)
def test_an_invalid_model_is_refused_with_its_name(model: bytes) -> None:
    with pytest.raises(DataError) as caught:
        Tokenizer(model, "tokenizer.model")
    assert str(caught.value).startswith("tokenizer.model ")
    assert "\n" not in str(caught.value)
