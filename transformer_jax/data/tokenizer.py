"""Byte-pair encoding with SentencePiece, one vocabulary for both languages (section 5.1).

A line that is encoded and decoded comes back as it was, but for this:

1. spaces (U+0020, no others) in a row become one;
2. "▁" (U+2581), which stands for a space in pieces, becomes a space;
3. spaces at both ends are gone;
4. characters that no training line had become " ⁇ ", with its spaces: one for all in a row.
"""

import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from transformer_jax.errors import DataError, TransformerJaxError
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN

# In bytes. SentencePiece would leave longer lines out without a word.
MAX_TRAINING_LINE = 4192


# What a stranger's model is tried with, and how much memory it may take for that. Its arguments
# are where packages are found here; it says when it has found its own.
PROBE = """
import resource, sys
sys.path[:] = sys.argv[1:]
import sentencepiece
print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
p = sentencepiece.SentencePieceProcessor(model_proto=sys.stdin.buffer.read())
p.encode("Two words, ½ and \u2581 \U0001f600.")
p.decode(list(range(len(p))))
"""
# Digests of models that this process has tried.
TRIED: set[str] = set()


class Tokenizer:
    """Turns lines into pieces and back. The model is data: a SentencePiece file."""

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        """Read a SentencePiece model.

        Raises:
            DataError: it is no such model, or its special pieces are not ours.
        """
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{name} is no SentencePiece model: {error}") from error
        p = self._processor
        if (p.pad_id(), p.bos_id(), p.eos_id(), p.unk_id()) != (PAD, BOS, EOS, UNKNOWN):
            raise DataError(
                f"{name} was not made here: its padding, begin, end and unknown pieces must be "
                f"{PAD}, {BOS}, {EOS}, {UNKNOWN}"
            )

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn at most `vocab_size` pieces; text too small for so many gives fewer.

        The same lines give the same bytes: one thread, and no file names inside.

        Raises:
            DataError: there is nothing to learn from, or no room for the characters.
        """
        model = io.BytesIO()
        raised: list[BaseException] = []
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_noting(lines, raised),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                character_coverage=1.0,
                max_sentence_length=MAX_TRAINING_LINE,
                normalization_rule_name="identity",
                num_threads=1,
                pad_id=PAD,
                bos_id=BOS,
                eos_id=EOS,
                unk_id=UNKNOWN,
                minloglevel=2,
            )
        except RuntimeError as error:
            # SentencePiece tells whatever the lines raise, Ctrl-C too, as an error of its own.
            if raised:
                raise raised[0] from None
            needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
            reason = f"its characters alone need {needed[1]}" if needed else str(error)
            raise DataError(
                f"no vocabulary of {vocab_size} pieces (data.vocab_size, or data.source_vocab_size "
                f"for the source's own) for this text: {reason}"
            ) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read the model file at `path`."""
        return cls(path.read_bytes(), str(path))

    @classmethod
    def load_untrusted(cls, model: bytes, name: str) -> "Tokenizer":
        """Read a model that anyone may have made: one that ends a process ends another one.

        Raises:
            DataError: as the constructor does, or the process that tried it first was ended.
            TransformerJaxError: there could be no such process.
        """
        digest = hashlib.sha256(model).hexdigest()
        if digest not in TRIED:
            _try(model, name)
            TRIED.add(digest)
        return cls(model, name)

    @property
    def digest(self) -> str:
        """SHA-256 of the model, in hexadecimal."""
        return hashlib.sha256(self.model).hexdigest()

    def __len__(self) -> int:
        return len(self._processor)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, with `EOS` at the end."""
        return self._processor.encode(list(lines), add_eos=True)

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Return the line of each sequence; padding, begin and end leave no trace."""
        return self._processor.decode([list(row) for row in pieces])


def _try(model: bytes, name: str) -> None:
    """Read a model in another process.

    Raises:
        DataError: that process was ended.
        TransformerJaxError: it could not begin, which is no fault of the model.
    """
    # Where this process would look, but for the working directory: that may be the stranger's.
    path = [place for place in sys.path if Path(place).is_absolute()]
    try:
        # Our own program, on Python itself.
        tried = subprocess.run(  # noqa: S603
            [sys.executable, "-I", "-c", PROBE, *path],
            input=model,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} is no SentencePiece model: reading it has no end") from None
    if tried.returncode == 0:
        return
    said = tried.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
    if b"ready\n" not in tried.stdout:
        raise TransformerJaxError(f"{name} cannot be tried in a process of its own: {said[0]}")
    raise DataError(f"{name} is no SentencePiece model: {said[0][:200]}")


def _noting(lines: Iterable[str], raised: list[BaseException]) -> Iterator[str]:
    """Yield the lines; note what they raise."""
    try:
        yield from lines
    except BaseException as error:
        raised.append(error)
        raise


class Vocabulary(NamedTuple):
    """The tokenizers of source and target: one and the same where they share their pieces."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def shared(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Return one for both languages, as in the paper."""
        return cls(tokenizer, tokenizer)

    @property
    def is_shared(self) -> bool:
        """Whether source and target have the same pieces."""
        return self.source is self.target

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments `vocab_size` and `source_vocab_size` of `build_transformer`.

        They are fields of `DataConfig` too. `vocab_size` counts the shared tokens, or the
        target's; `source_vocab_size` counts the source's, and is None if they are shared.
        """
        source_vocab_size = None if self.is_shared else len(self.source)
        return {"vocab_size": len(self.target), "source_vocab_size": source_vocab_size}

    @property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The different tokenizers, by the name that reports and runs have for each."""
        own = {} if self.is_shared else {"source_vocabulary": self.source}
        return {"vocabulary": self.target, **own}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what tells these tokenizers from others, as plain data."""
        return {
            name: {"pieces": len(tokenizer), "sha256": tokenizer.digest}
            for name, tokenizer in self.tokenizers.items()
        }
