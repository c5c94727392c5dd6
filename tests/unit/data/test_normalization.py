"""Test that normalization is part of the tokenizer model, with Python's Unicode as the oracle."""

import unicodedata

import pytest
import sentencepiece

from transformer_jax.data.normalization import INVISIBLE, SPACES, Normalization
from transformer_jax.data.tokenizer import Tokenizer

LINES = ["one two", "drei vier", "f\u00fcnf", "l\u1ec7"]


def normalize(text: str, name: Normalization) -> str:
    """Return the text that a tokenizer model splits, without the marks of word starts."""
    model = Tokenizer.train(LINES, 64, normalization=name).model
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return processor.normalize(text).replace("\u2581", " ").strip()


@pytest.mark.parametrize("name", ["spaces", "nfc"])
def test_white_space_becomes_a_space_and_invisible_characters_disappear(
    name: Normalization,
) -> None:
    text = "".join(f"a{space}b" for space in SPACES) + "".join(f"c{x}d" for x in INVISIBLE)
    assert normalize(text, name) == "a b" * len(SPACES) + "cd" * len(INVISIBLE)
    assert all(unicodedata.category(space) in ("Zs", "Zl", "Zp", "Cc") for space in SPACES)


@pytest.mark.parametrize(
    "written",
    [
        *(
            "l\u1ec7",
            "le\u0323\u0302",
            "le\u0302\u0323",
            "l\u00ea\u0323",
            "l\u1eb9\u0302",
        ),
        *("cafe\u0301", "\u1112\u1161\u11ab", "\ud558\u11ab", "\u212b", "\u0958"),
        "\ufb01 \u00bd \u2026 \u201cx\u201d",
    ],
)
def test_nfc_composes_characters_as_unicode_defines_it(written: str) -> None:
    assert normalize(written, "nfc") == unicodedata.normalize("NFC", written)


def test_nfkc_also_replaces_compatibility_characters() -> None:
    assert normalize("\ufb01x\u3000\uff21\u00a0fu\u0308nf", "nfkc") == "fix A f\u00fcnf"


def test_without_normalization_text_stays_as_it_is() -> None:
    assert normalize("a\tb\u00a0fu\u0308nf", "none") == "a\tb\u00a0fu\u0308nf"


@pytest.mark.parametrize("name", ["none", "spaces", "nfc", "nfkc"])
def test_the_same_lines_yield_the_same_model(name: Normalization) -> None:
    first, second = (Tokenizer.train(LINES, 64, normalization=name) for _ in range(2))
    assert first.model == second.model
    assert b".tsv" not in first.model
