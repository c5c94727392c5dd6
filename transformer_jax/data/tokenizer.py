"""Byte-pair encoding with SentencePiece and one vocabulary for both languages (section 5.1).

Encoding and then decoding a line returns the same line, with these exceptions:

1. a run of spaces (only U+0020) becomes one space;
2. "▁" (U+2581), which SentencePiece uses for a space, becomes a space;
3. leading and trailing spaces are removed;
4. a run of characters that do not occur in the training text becomes " ⁇ ", which begins and ends
   with a space;
5. characters change if `data.normalization` replaces them (see `normalization`).
"""

import contextlib
import functools
import hashlib
import importlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import sentencepiece

from transformer_jax.data.normalization import Normalization, normalization_rules
from transformer_jax.errors import DataError, TransformerJaxError
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN

Unit = Literal["subwords", "words"]
"""The kind of tokens: subwords from byte-pair encoding, or whole words."""

# The maximum length of a training line in bytes. SentencePiece silently drops longer lines.
MAX_TRAINING_LINE = 4192

# This program loads an untrusted model in a separate process, with at most 2 GiB of memory. The
# program's command-line arguments are the entries in `sys.path`. The program prints "ready" once
# its imports succeed.
PROBE = r"""
import resource, sys
sys.path[:] = sys.argv[1:]
import sentencepiece
print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
p = sentencepiece.SentencePieceProcessor(model_proto=sys.stdin.buffer.read())
p.encode("Two words, \u00bd and \u2581 \U0001f600.")
p.decode(list(range(len(p))))
p.id_to_piece(list(range(len(p))))
"""
MODEL_TYPES: dict[Unit, str] = {"subwords": "bpe", "words": "word"}
# The display names of the special tokens.
NAMES = {PAD: "<PAD>", BOS: "<BOS>", EOS: "<EOS>", UNKNOWN: "<UNK>"}
# Digests of the tokenizer models that a separate process has already loaded safely.
TRIED: set[str] = set()


class Tokenizer:
    """A tokenizer that converts lines to token IDs and back with a SentencePiece model."""

    table: Any = None
    """The `TokenTable` of a `TableTokenizer`, or None if the IDs come from the model."""
    _names: Mapping[int, str] = NAMES

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        """Read a model from bytes; if it is invalid, raise a DataError that mentions `name`."""
        self.model = model
        self._processor = p = read_model(model, name)
        if (p.pad_id(), p.bos_id(), p.eos_id(), p.unk_id()) != (PAD, BOS, EOS, UNKNOWN):
            raise DataError(
                f"{name} has different special tokens: padding, BOS, EOS, and unknown must be "
                f"{PAD}, {BOS}, {EOS}, {UNKNOWN}"
            )

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        unit: Unit = "subwords",
        normalization: Normalization = "none",
    ) -> "Tokenizer":
        """Train a vocabulary of at most `vocab_size` tokens. A short text yields fewer tokens.

        If `unit` is "words", the tokens are the most frequent words in the lines. All other words
        become the unknown token.

        The same lines yield a byte-identical model on any machine, because training uses one
        thread and the model contains no file names.

        Raises:
            DataError: the lines are empty or have too many distinct characters.
        """
        model = io.BytesIO()
        raised: list[BaseException] = []

        def record_errors() -> Iterator[str]:
            try:
                yield from lines
            except BaseException as error:
                raised.append(error)
                raise

        try:
            with _normalization_options(normalization) as options:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=record_errors(),
                    model_writer=model,
                    model_type=MODEL_TYPES[unit],
                    vocab_size=vocab_size,
                    hard_vocab_limit=False,
                    character_coverage=1.0,
                    max_sentence_length=MAX_TRAINING_LINE,
                    num_threads=1,
                    pad_id=PAD,
                    bos_id=BOS,
                    eos_id=EOS,
                    unk_id=UNKNOWN,
                    minloglevel=2,
                    **options,
                )
        except RuntimeError as error:
            # SentencePiece wraps every exception that the iterator raises, even KeyboardInterrupt.
            if raised:
                raise raised[0] from None
            needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
            reason = f"its characters alone need {needed[1]}" if needed else str(error)
            raise DataError(
                f"cannot train a vocabulary of {vocab_size} tokens (data.vocab_size, or "
                f"data.source_vocab_size for a separate source vocabulary) on this text: {reason}"
            ) from error
        has_file = normalization in ("spaces", "nfc")
        return cls(_without_file_name(model.getvalue()) if has_file else model.getvalue())

    @property
    def digest(self) -> str:
        """The SHA-256 of the model and the table (if there is one), in hexadecimal."""
        return digest_files(self.model, b"" if self.table is None else self.table.to_json())

    @functools.cached_property
    def token_texts(self) -> list[str]:
        """The text of each token, in order of token ID. "▁" represents a space."""
        return [self._processor.id_to_piece(token) for token in range(len(self))]

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return len(self._processor)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each line, with `EOS` at the end."""
        return self._processor.encode(list(lines), add_eos=True)

    def sample(self, lines: Sequence[str], dropout: float, seed: int) -> list[list[int]]:
        """Return a random encoding of each line, with `EOS` at the end (Provilkov et al. 2020).

        Byte-pair encoding skips each merge with probability `dropout`. The result is a function of
        all arguments.
        """
        sentencepiece.set_random_generator_seed(seed)
        # One thread encodes all lines in order. With more threads, the order of random numbers and
        # lines would change from call to call.
        sampling = {"enable_sampling": True, "alpha": dropout, "nbest_size": -1, "num_threads": 1}
        return self._processor.encode(list(lines), add_eos=True, **sampling)

    def split(self, line: str) -> list[str]:
        """Return the text of each token, without `EOS`; unknown tokens keep the line's text."""
        return self._processor.encode(line, out_type=str)

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Decode each sequence to a line, without padding, BOS, or EOS."""
        return self._processor.decode([list(sequence) for sequence in tokens])

    def to_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token. "▁" marks the start of a word, and `EOS` is "<EOS>"."""
        return [self._names.get(token) or self.token_texts[token] for token in tokens]


@contextlib.contextmanager
def _normalization_options(name: Normalization) -> Iterator[dict[str, Any]]:
    """Yield the options that select a normalization, whose rules may be in a temporary file."""
    if name not in ("spaces", "nfc"):
        yield {"normalization_rule_name": {"none": "identity", "nfkc": "nmt_nfkc"}[name]}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as file:
        file.write(normalization_rules(name))
        file.flush()
        yield {"normalization_rule_tsv": file.name}


def _without_file_name(model: bytes) -> bytes:
    """Remove the name of the file with normalization rules, which differs between machines."""
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    content = messages.ModelProto.FromString(model)
    content.normalizer_spec.ClearField("normalization_rule_tsv")
    return content.SerializeToString(deterministic=True)


def digest_files(*contents: bytes) -> str:
    """Return the SHA-256 of the concatenated file contents, in hexadecimal."""
    return hashlib.sha256(b"".join(contents)).hexdigest()


def read_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Read a SentencePiece model, or raise a DataError that mentions `name` if it is invalid."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{name} is not a SentencePiece model: {error}") from error


def check_model(model: bytes, name: str) -> None:
    """Load a model in a separate process, because loading a corrupt model may cause a crash."""
    digest = digest_files(model)
    if digest in TRIED:
        return
    problem = f"{name} is not a SentencePiece model"
    # Omit relative import paths, because the model's author may control the working directory.
    path = [entry for entry in sys.path if Path(entry).is_absolute()]
    command = [sys.executable, "-I", "-c", PROBE, *path]
    try:
        # This command is safe: it runs a constant program with the current Python interpreter.
        probe = subprocess.run(command, input=model, capture_output=True, timeout=60)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise DataError(f"{problem}: loading it timed out") from None
    if probe.returncode:
        errors = probe.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
        if b"ready\n" not in probe.stdout:
            raise TransformerJaxError(f"{name} cannot be tested in a new process: {errors[-1]}")
        raise DataError(f"{problem}: {errors[-1][:200]}")
    TRIED.add(digest)


class Vocabulary(NamedTuple):
    """The source and target tokenizers, which are the same object if the languages share one."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def share(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Use one tokenizer for both languages, as the paper does."""
        return cls(tokenizer, tokenizer)

    @property
    def is_shared(self) -> bool:
        """Whether both languages share a vocabulary. The SentencePiece models can still differ."""
        if self.source is self.target:
            return True
        return self.source.table is not None and self.source.table == self.target.table

    @property
    def sizes(self) -> dict[str, Any]:
        """The vocabulary sizes, keyed by config field (None for a shared source vocabulary)."""
        source_vocab_size = None if self.is_shared else len(self.source)
        return {"vocab_size": len(self.target), "source_vocab_size": source_vocab_size}

    @property
    def tokenizers(self) -> dict[str, Tokenizer]:
        """The distinct tokenizers, keyed by their names in reports and run.json."""
        separate = {} if self.source is self.target else {"source_vocabulary": self.source}
        return {"vocabulary": self.target, **separate}

    def describe(self) -> dict[str, dict[str, int | str]]:
        """Return the size and digest of each tokenizer."""
        return {
            name: {"size": len(tokenizer), "sha256": tokenizer.digest}
            for name, tokenizer in self.tokenizers.items()
        }
