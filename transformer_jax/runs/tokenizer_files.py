"""Read and write the files that store a run's vocabulary.

    tokenizer.model               the SentencePiece model
    tokenizer.table.json          the table of tokens, if their IDs differ from the model's
    tokenizer.source.model        the source language's model
    tokenizer.source.table.json   the source language's table

The source language's files exist only if that language has its own vocabulary.
"""

from pathlib import Path

from transformer_jax.data.token_table import TableTokenizer, TokenTable
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary, check_model, digest_files
from transformer_jax.errors import StorageError
from transformer_jax.files import MAX_VOCABULARY_BYTES, JsonObject, read_limited

MODELS = {"vocabulary": "tokenizer.model", "source_vocabulary": "tokenizer.source.model"}


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Write all tokenizers of a vocabulary to a folder."""
    for name, tokenizer in vocabulary.tokenizers.items():
        path = folder / MODELS[name]
        path.write_bytes(tokenizer.model)
        if tokenizer.table is not None:
            path.with_suffix(".table.json").write_bytes(tokenizer.table.to_json())


def read_vocabulary(folder: Path, description: JsonObject) -> Vocabulary:
    """Read the tokenizers that a run's description lists, and verify their digests."""
    tokenizers = {
        name: _read_tokenizer(folder / file, description[name]["sha256"])
        for name, file in MODELS.items()
        if name in description
    }
    target = tokenizers["vocabulary"]
    return Vocabulary(tokenizers.get("source_vocabulary", target), target)


def _read_tokenizer(path: Path, digest: object) -> Tokenizer:
    model, table_path = read_limited(path, MAX_VOCABULARY_BYTES), path.with_suffix(".table.json")
    table = read_limited(table_path, MAX_VOCABULARY_BYTES) if table_path.exists() else b""
    if digest_files(model, table) != digest:
        raise StorageError(f"{path} is not the vocabulary that the run was created with")
    parsed = TokenTable.from_json(table, str(table_path)) if table else None
    check_model(model, str(path))
    name = str(path)
    return Tokenizer(model, name) if parsed is None else TableTokenizer(model, parsed, name)
