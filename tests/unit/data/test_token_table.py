"""Test tokenizers whose token IDs come from a table."""

import json
from typing import Any

import pytest
from opus_mt import SOURCES, train_model

from transformer_jax.data.token_table import TableTokenizer, TokenTable
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN

MODEL = train_model(SOURCES, 60)
TOKENS = ("</s>", "<unk>", "a", "▁two", "▁hundred", ">>deu<<", "<pad>")
TABLE = TokenTable(TOKENS, padding=6, begin=None, end=0, unknown=1)


def test_special_tokens_have_the_ids_of_this_package() -> None:
    assert TABLE.order == (6, 2, 0, 1, 3, 4, 5)
    assert TABLE.token_texts[PAD] == "<pad>"
    assert TABLE.token_texts[EOS] == "</s>"
    assert TABLE.token_texts[UNKNOWN] == "<unk>"
    # The vocabulary has no beginning-of-sentence token, so an ordinary token takes the ID of BOS.
    assert TABLE.token_texts[BOS] == "a"
    with_begin = TABLE._replace(begin=3)
    assert with_begin.order == (6, 3, 0, 1, 2, 4, 5)
    assert sorted(with_begin.order) == list(range(len(TOKENS)))


def test_a_table_with_the_ids_of_this_package_keeps_the_order() -> None:
    table = TokenTable(("p", "b", "e", "u", "x", "y"), padding=0, begin=1, end=2, unknown=3)
    assert table.order == tuple(range(6))


def test_pieces_outside_the_table_are_unknown() -> None:
    tokenizer = TableTokenizer(MODEL, TABLE)
    known = tokenizer.encode([">>deu<< two hundred"])[0]
    assert tokenizer.to_texts(known) == [">>deu<<", "▁two", "▁hundred", "<EOS>"]
    assert tokenizer.decode([[*known, PAD, PAD]]) == [">>deu<< two hundred"]
    assert tokenizer.encode(["xyz", ""]) == [
        [*[UNKNOWN] * (len(tokenizer.split("xyz"))), EOS],
        [EOS],
    ]
    assert tokenizer.to_texts([BOS]) == ["a"]
    assert len(tokenizer) == len(TOKENS)


def test_two_models_with_one_table_share_a_vocabulary() -> None:
    other = train_model(SOURCES, 45)
    source, target = TableTokenizer(MODEL, TABLE), TableTokenizer(other, TABLE)
    assert Vocabulary(source, target).sizes == {"vocab_size": 7, "source_vocab_size": None}
    changed = TableTokenizer(other, TABLE._replace(begin=2))
    assert Vocabulary(source, changed).sizes == {"vocab_size": 7, "source_vocab_size": 7}
    assert len({source.digest, target.digest, changed.digest}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding": 7}, "has the padding token 7, but its tokens have the IDs 0 to 6"),
        ({"end": True}, "has the end token True, but"),
        ({"unknown": -1}, "has the unknown token -1, but"),
        ({"begin": 0}, "has one ID for several special tokens"),
        ({"tokens": [*TOKENS[:6], "a"]}, "contains the same token twice"),
        ({"tokens": [*TOKENS[:6], 3]}, "contains a token that is not a string"),
        ({"tokens": None}, "is not a table of tokens"),
    ],
)
def test_an_inconsistent_table_is_an_error(changes: dict[str, Any], message: str) -> None:
    content = json.dumps({**json.loads(TABLE.to_json()), **changes}).encode()
    with pytest.raises(DataError, match=message) as raised:
        TokenTable.from_json(content, "table.json")
    assert str(raised.value).startswith("table.json ")


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b"{}", b"\xff"])
def test_a_file_that_is_no_table_is_an_error(content: bytes) -> None:
    with pytest.raises(DataError, match="is not a table of tokens"):
        TokenTable.from_json(content, "table.json")


def test_json_restores_the_table() -> None:
    assert TokenTable.from_json(TABLE.to_json(), "x") == TABLE
    assert Tokenizer.table is None
