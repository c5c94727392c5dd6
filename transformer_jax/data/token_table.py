"""A tokenizer whose token IDs come from a table, as in Marian models.

Marian splits text with one SentencePiece model for each language. Marian then maps each token to an
ID with a table that both languages can share. In this package, `special_tokens` defines the IDs of
special tokens, so the order of tokens differs from Marian's.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.data.tokenizer import NAMES, Tokenizer, read_model
from transformer_jax.errors import DataError
from transformer_jax.special_tokens import BOS, EOS, UNKNOWN

SPECIAL = ("padding", "begin", "end", "unknown")
"""The special tokens, in the order of their IDs in this package."""


class TokenTable(NamedTuple):
    """The tokens of another program, such as Marian, with that program's IDs."""

    tokens: tuple[str, ...]
    """The text of each token, in the order of the other program's IDs."""
    padding: int
    begin: int | None
    """The ID of the decoder's start token, or None if the decoder starts with padding."""
    end: int
    unknown: int

    @classmethod
    def from_json(cls, content: bytes, name: str) -> "TokenTable":
        """Convert the output of `to_json` to a table, or raise a DataError that mentions `name`."""
        try:
            data = json.loads(content)
            table = cls(tuple(data["tokens"]), *(data[special] for special in SPECIAL))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{name} is not a table of tokens: {error}") from error
        table.check(name)
        return table

    def to_json(self) -> bytes:
        """Return the table as JSON."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    def check(self, name: str) -> None:
        """Raise a DataError that mentions `name` if the table is inconsistent."""
        if not all(isinstance(token, str) for token in self.tokens):
            raise DataError(f"{name} contains a token that is not a string")
        if len(set(self.tokens)) < len(self.tokens):
            raise DataError(f"{name} contains the same token twice")
        special = {k: getattr(self, k) for k in SPECIAL if k != "begin" or self.begin is not None}
        for key, token in special.items():
            if type(token) is not int or not 0 <= token < len(self.tokens):
                raise DataError(
                    f"{name} has the {key} token {str(token)[:50]}, but its tokens have the IDs 0 "
                    f"to {len(self.tokens) - 1}"
                )
        if len(set(special.values())) < len(special):
            raise DataError(f"{name} has one ID for several special tokens: {special}")
        if len(self.tokens) <= UNKNOWN:
            raise DataError(f"{name} has only {len(self.tokens)} tokens")

    @property
    def order(self) -> tuple[int, ...]:
        """The other program's ID for each token in this package, special tokens first."""
        special = {self.padding, self.begin, self.end, self.unknown}
        ordinary = [token for token in range(len(self.tokens)) if token not in special]
        begin = ordinary.pop(0) if self.begin is None else self.begin
        return (self.padding, begin, self.end, self.unknown, *ordinary)

    @property
    def token_texts(self) -> list[str]:
        """The text of each token, in the order of the IDs in this package."""
        return [self.tokens[token] for token in self.order]

    @property
    def names(self) -> dict[int, str]:
        """The display names of the special tokens, keyed by their IDs in this package."""
        return {k: v for k, v in NAMES.items() if k != BOS or self.begin is not None}


class TableTokenizer(Tokenizer):
    """A tokenizer that splits text with a SentencePiece model and looks up IDs in a table.

    A token that is not in the table becomes the unknown token. Decoding omits special tokens, as
    `MarianTokenizer` in the transformers library does.
    """

    def __init__(self, model: bytes, table: TokenTable, name: str = "tokenizer") -> None:
        """Read a model from bytes; if it is invalid, raise a DataError that mentions `name`."""
        self.model, self.table = model, table
        self._processor = read_model(model, name)
        self.token_texts, self._names = table.token_texts, table.names
        # Ordinary text must not be encoded as special tokens.
        self._ids = {p: i for i, p in enumerate(self.token_texts) if i not in self._names}

    def __len__(self) -> int:
        """Return the number of tokens in the table."""
        return len(self.token_texts)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each line, with `EOS` at the end."""
        return [[*(self._ids.get(p, UNKNOWN) for p in self.split(line)), EOS] for line in lines]

    def sample(self, lines: Sequence[str], dropout: float, seed: int) -> list[list[int]]:  # noqa: ARG002
        """Raise a DataError, because the model can give tokens that are not in the table."""
        raise DataError(f"data.bpe_dropout must be 0 with an imported vocabulary, got {dropout:g}")

    def split(self, line: str) -> list[str]:
        """Return the text of each token; a leading language code, such as >>fra<<, is one token."""
        code, end = "", line.find("<<")
        if line.startswith(">>") and end >= 0:
            code, line = line[: end + 2], line[end + 2 :]
        return [*filter(None, [code]), *super().split(line)]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Decode each sequence to a line, without special tokens."""
        texts = [[self.token_texts[x] for x in line if x not in self._names] for line in tokens]
        # When SentencePiece decodes a token that is not in its model, it keeps the "▁".
        return [self._processor.decode_pieces(x).replace("▁", " ").strip() for x in texts]
