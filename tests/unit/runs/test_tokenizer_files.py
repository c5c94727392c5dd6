"""Test that tokenizers and their tables can be written to a folder and read back."""

from pathlib import Path

import pytest
from opus_mt import SOURCES, train_model

from transformer_jax.data.token_table import TableTokenizer, TokenTable
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import StorageError
from transformer_jax.runs.tokenizer_files import read_vocabulary, write_vocabulary

MODEL = train_model(SOURCES, 60)
TOKENS = ("</s>", "<unk>", "a", "▁two", "▁hundred", ">>deu<<", "<pad>")
TABLE = TokenTable(TOKENS, padding=6, begin=None, end=0, unknown=1)


def test_a_vocabulary_with_tables_survives_a_folder(tmp_path: Path) -> None:
    other = train_model(SOURCES, 45)
    vocabulary = Vocabulary(TableTokenizer(MODEL, TABLE), TableTokenizer(other, TABLE))
    write_vocabulary(tmp_path, vocabulary)
    again = read_vocabulary(tmp_path, vocabulary.describe())
    assert [t.digest for t in again] == [t.digest for t in vocabulary]
    assert again.is_shared
    assert again.source.encode(SOURCES[:3]) == vocabulary.source.encode(SOURCES[:3])
    # `read_vocabulary` detects tables that have been added, changed, or removed.
    table = tmp_path / "tokenizer.table.json"
    table.write_bytes(table.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(StorageError, match="is not the vocabulary"):
        read_vocabulary(tmp_path, vocabulary.describe())
    table.unlink()
    with pytest.raises(StorageError, match="is not the vocabulary"):
        read_vocabulary(tmp_path, vocabulary.describe())
