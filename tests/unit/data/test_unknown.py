"""Test the notes about text that is missing from a vocabulary."""

import re
import warnings

import pytest
from run_files import write_untrained_run

from transformer_jax import load
from transformer_jax.data.batches import Ragged
from transformer_jax.data.token_table import TableTokenizer, TokenTable
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.unknown import note_unknown
from transformer_jax.progress import Note
from transformer_jax.special_tokens import UNKNOWN

LINES = ["two dogs play in the snow", "drei hunde", ">>deu<< a b c"]
TOKENIZER = Tokenizer.train(LINES, 64)


def notes_about(lines: list[str], tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        note_unknown("the source", tokenizer, lines)
    return [str(warning.message) for warning in caught]


def test_text_of_the_vocabulary_gets_no_note() -> None:
    assert notes_about([*LINES, "", "a dog"]) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\tdogs", r"'\t' (U+0009)"),
        ("two\u00a0dogs", r"'\xa0' (U+00A0)"),
        ("two\u3000dogs", r"'\u3000' (U+3000)"),
        ("two \u201cdogs\u201d", "'\u201c' (U+201C), '\u201d' (U+201D)"),
        ("dogs \U0001f415", "'\U0001f415' (U+1F415)"),
        ("собаки", "'собаки'"),
        ("two\x1bdogs", r"'\x1b' (U+001B)"),
    ],
)
def test_a_note_names_the_characters_that_the_vocabulary_lacks(text: str, shown: str) -> None:
    (line,) = notes_about(["two dogs play in the snow"] * 50 + [text])
    assert "1 of 51 lines contain text that the vocabulary lacks" in line
    assert shown in line


def test_the_share_counts_unknown_tokens_but_not_the_ends_of_sentences() -> None:
    lines = ["two dogs"] * 9 + ["日"]
    tokens = [token for line in TOKENIZER.encode(lines) for token in line[:-1]]
    (line,) = notes_about(lines)
    assert f"so {tokens.count(UNKNOWN) / len(tokens):.2%} of the tokens are unknown" in line


def test_a_large_share_is_called_suspicious() -> None:
    few, many = (notes_about([*["two dogs"] * count, "日"])[0] for count in (100, 1))
    assert "data.normalization" not in few
    assert "the language, the encoding, or the whitespace may be wrong" in many


def test_an_unknown_language_code_is_reported() -> None:
    pieces = [TOKENIZER.token_texts[i] for i in range(4, len(TOKENIZER))]
    table = TokenTable(("</s>", "<unk>", "<pad>", ">>deu<<", *pieces), 2, None, 0, 1)
    tokenizer = TableTokenizer(TOKENIZER.model, table)
    assert notes_about([">>deu<< two dogs"], tokenizer) == []
    (line,) = notes_about([">>dex<< two dogs"], tokenizer)
    assert "'>>dex<<'" in line


def test_prepared_tokens_are_counted_without_their_lines() -> None:
    tokens = Ragged.from_lists(TOKENIZER.encode(["two", "日 dogs 日", "dogs"]))
    with pytest.warns(Note, match=r"train source: 1 of 3 lines .* unknown"):
        note_unknown("train source", TOKENIZER, tokens=tokens)


def test_every_use_of_a_run_notes_unknown_text_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = load(write_untrained_run(tmp_path_factory.mktemp("runs") / "run", steps=(8,)).path)

    def count_notes(*arguments: object, use: str, **options: object) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(run, use)(*arguments, **options)
        return [str(warning.message) for warning in caught]

    odd = "one\u00a0日"
    assert len(count_notes([odd, "one"], use="translate")) == 1
    assert len(count_notes([odd], 1, use="translate_best")) == 1
    assert len(count_notes(odd, use="attention")) == 1
    notes = count_notes("one", odd, use="attention")
    assert [re.split(":", note)[0] for note in notes] == ["the target"]
