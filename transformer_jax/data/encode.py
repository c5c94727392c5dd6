"""Encode lines in chunks, write token IDs to flat files, and count and drop unsuitable pairs.

An encoded corpus consists of these files:

    {train,dev,test}.{source,target}.{tokens,lengths}   little-endian integers
    {dev,test}.{source,target}.txt                      the lines
"""

import base64
import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from transformer_jax import progress
from transformer_jax.config import DataConfig
from transformer_jax.data.batches import Ragged
from transformer_jax.data.corpora import Corpus
from transformer_jax.data.splits import Split
from transformer_jax.data.text_files import MAX_LINE_BYTES, is_too_long
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError
from transformer_jax.files import write_bytes
from transformer_jax.parallel import count_usable_cores, map_in_order

T = TypeVar("T")
Pairs = Sequence[tuple[str, str]]

SIDES = ("source", "target")
# A chunk ends when it reaches the limit on pairs or on characters. A token takes up 36 bytes in a
# list of Python integers.
CHUNK_PAIRS = 4096
CHUNK_CHARACTERS = 1 << 21
LENGTH = np.dtype("<u4")
# A process takes about a second to start, so each one must have at least this many pairs to encode.
# Each process needs about 60 MiB.
PAIRS_PER_PROCESS = 1 << 15
MAX_PROCESSES = 16
# The fields in a DataConfig that determine how a chunk is encoded.
FIELDS = ("max_length", "max_ratio", "bpe_dropout")

# Symbols that sentences must not contain: control characters except the tab, Unicode line and
# paragraph separators, byte-order marks, and the symbols that SentencePiece reserves.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ufeff\u2581\u2585]|<(?:pad|s|/s|unk)>")


def token_dtype(tokenizer: Tokenizer) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the smallest integer type that can store every token ID."""
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def read_tokens(folder: Path, split: Split, side: str, tokenizer: Tokenizer) -> Ragged:
    """Return the tokens that a `SplitWriter` wrote, memory-mapped from disk."""
    lengths = np.fromfile(folder / f"{split}.{side}.lengths", LENGTH)
    tokens = np.memmap(folder / f"{split}.{side}.tokens", token_dtype(tokenizer), "r")
    return Ragged(tokens, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def why_unfit_text(source: str, target: str) -> str | None:
    """Return the reason for dropping this pair of lines, or None to keep the pair."""
    if not source.strip() or not target.strip():
        return "empty"
    if is_too_long(source) or is_too_long(target):
        return "too long"
    return "control symbols" if CONTROL.search(source) or CONTROL.search(target) else None


def why_unfit_tokens(source: int, target: int, config: DataConfig) -> str | None:
    """Return the reason for dropping a pair with these token counts, or None to keep the pair."""
    # The token counts include EOS, but the length ratio ignores it.
    shorter, longer = sorted((source - 1, target - 1))
    if shorter == 0:
        return "empty"
    if longer + 1 > config.max_length:
        return "too long"
    return "ratio" if longer > config.max_ratio * shorter else None


class Chunk(NamedTuple):
    """Consecutive pairs in a split."""

    first: int
    """The index of the first pair, counted across all samples of the text."""
    pairs: Pairs


class Encoded(NamedTuple):
    """A chunk of pairs, encoded."""

    num_pairs: int
    outcome: Counter[str]
    """The number of pairs with each outcome; see `SplitWriter.write`."""
    content: dict[tuple[str, str], bytes]
    """The bytes to append to each file, keyed by side and kind of file."""

    def to_bytes(self) -> bytes:
        """Return a line of JSON, followed by the contents."""
        sizes = [[*key, len(content)] for key, content in self.content.items()]
        head = json.dumps([self.num_pairs, self.outcome, sizes])
        return b"\n".join([head.encode(), b"".join(self.content.values())])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Encoded":
        """Convert the result of `to_bytes` back to a chunk."""
        head, _, rest = data.partition(b"\n")
        num_pairs, outcome, sizes = json.loads(head)
        ends = itertools.accumulate(size for *_, size in sizes)
        content = {
            (side, kind): rest[end - size : end]
            for (side, kind, size), end in zip(sizes, ends, strict=True)
        }
        return cls(num_pairs, Counter(outcome), content)


class SplitWriter:
    """A resumable writer for one split's files."""

    def __init__(
        self, folder: Path, corpus: Corpus, split: Split, vocabulary: Vocabulary, config: DataConfig
    ) -> None:
        """Choose the paths of the split's files in `folder`, without writing anything yet."""
        self.corpus, self.split, self.config = corpus, split, config
        self.vocabulary = vocabulary
        # Only the training split is filtered, because the dev and test splits are scored in full.
        self.is_filtered = split == "train"
        is_sampled = self.is_filtered and config.bpe_dropout > 0
        self.num_samples = config.bpe_dropout_samples if is_sampled else 1
        kinds = ["tokens", "lengths"] if self.is_filtered else ["tokens", "lengths", "txt"]
        self.paths = {
            (side, kind): folder / f"{split}.{side}.{kind}" for side in SIDES for kind in kinds
        }
        self.journal = folder / f"{split}.journal.json"

    def write(self) -> dict[str, int]:
        """Encode the split; return the numbers of pairs, in total and with each outcome."""
        total = self.corpus.count(self.split) * self.num_samples
        done, outcome = self._resume()
        with ExitStack() as stack:
            self.files = {k: stack.enter_context(path.open("ab")) for k, path in self.paths.items()}
            results = self._encode(self._read_chunks(done), total - done)
            try:
                for encoded in stack.enter_context(contextlib.closing(results)):
                    for key, file in self.files.items():
                        file.write(encoded.content[key])
                    outcome.update(encoded.outcome)
                    done += encoded.num_pairs
                    progress.report(f"encoding {self.split}", done, total)
                    self._write_journal(done, outcome)
            except DataError:
                # The text may have changed, so the files may contain lines from different versions
                # of the text. Delete the journal, so that the next attempt starts over.
                self.journal.unlink(missing_ok=True)
                raise
        if not outcome["kept"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (+outcome).items())
            raise DataError(
                f"{self.corpus.name}: none of the {total} pairs can be used for training: "
                f"{reasons} (data.max_length {self.config.max_length}, data.max_ratio "
                f"{self.config.max_ratio:g})"
            )
        return {"pairs": done, **outcome}

    def _read_chunks(self, done: int) -> Iterator[Chunk]:
        """Read all samples of the text, except for the first `done` pairs."""
        first, start = divmod(done, max(self.corpus.count(self.split), 1))
        samples = (
            self.corpus.read(self.split, start if sample == first else 0)
            for sample in range(first, self.num_samples)
        )
        for pairs in _chunks(itertools.chain.from_iterable(samples)):
            yield Chunk(done, self._check_lines(pairs))
            done += len(pairs)

    def _encode(self, chunks: Iterator[Chunk], num_pairs: int) -> Generator[Encoded]:
        """Encode chunks, in several processes if `num_pairs` is large enough."""
        tokenizers = self.vocabulary.tokenizers.values()
        num_processes = min(count_usable_cores(), num_pairs // PAIRS_PER_PROCESS, MAX_PROCESSES)
        # Only imported models have tables, and they rarely encode large texts.
        if num_processes < 2 or any(tokenizer.table is not None for tokenizer in tokenizers):
            for chunk in chunks:
                yield encode_chunk(self.vocabulary, self.config, self.is_filtered, chunk)
            return
        models = [base64.b64encode(tokenizer.model).decode() for tokenizer in self.vocabulary]
        fields = {key: getattr(self.config, key) for key in FIELDS}
        setup = json.dumps([models, fields, self.is_filtered]).encode()
        requests = (json.dumps(chunk).encode() for chunk in chunks)
        handler = f"{__name__}:{open_encoder.__name__}"
        with contextlib.closing(map_in_order(handler, setup, requests, num_processes)) as answers:
            yield from map(Encoded.from_bytes, answers)

    def _check_lines(self, pairs: Pairs) -> Pairs:
        """Raise a DataError if a line that must be scored is too long or contains a newline."""
        for line in () if self.is_filtered else itertools.chain(*zip(*pairs, strict=True)):
            if (is_long := is_too_long(line)) or "\n" in line:
                problem = f"of more than {MAX_LINE_BYTES} bytes" if is_long else "with a newline"
                raise DataError(
                    f"{self.split} of {self.corpus.name} has a line {problem}, which begins with "
                    f"{line[:40]!r}"
                )
        return pairs

    def _write_journal(self, done: int, outcome: Counter[str]) -> None:
        for file in self.files.values():
            file.flush()
        sizes = [path.stat().st_size for path in self.paths.values()]
        journal = json.dumps({"done": done, "outcome": outcome, "sizes": sizes})
        write_bytes(self.journal, journal.encode(), durable=False)

    def _resume(self) -> tuple[int, Counter[str]]:
        """Truncate the files to the sizes in the journal, or empty them; return the progress."""
        try:
            journal = json.loads(self.journal.read_bytes())
            sizes = dict(zip(self.paths.values(), journal["sizes"], strict=True))
            if any(path.stat().st_size < size for path, size in sizes.items()):
                raise ValueError("a file is shorter than the journal says")
            done, outcome = journal["done"], Counter[str](journal["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            done, outcome = 0, Counter[str]()
            sizes = dict.fromkeys(self.paths.values(), 0)
        for path, size in sizes.items():
            path.touch()
            os.truncate(path, size)
        return done, outcome


def open_encoder(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that encodes chunks in another process; see `SplitWriter`."""
    models, fields, is_filtered = json.loads(setup)
    vocabulary = Vocabulary(*(Tokenizer(base64.b64decode(model)) for model in models))
    config = DataConfig(**fields)

    def encode(request: bytes) -> bytes:
        chunk = Chunk(*json.loads(request))
        return encode_chunk(vocabulary, config, is_filtered, chunk).to_bytes()

    return encode


def encode_chunk(
    vocabulary: Vocabulary, config: DataConfig, is_filtered: bool, chunk: Chunk
) -> Encoded:
    """Encode pairs of lines.

    If `is_filtered` is true, drop unsuitable pairs and apply the configured BPE-dropout.
    """
    first, pairs = chunk
    num_pairs, outcome, content = len(pairs), Counter[str](), dict[tuple[str, str], bytes]()
    if is_filtered:
        pairs = _drop_unfit(pairs, why_unfit_text, outcome)

    def encode(side: int) -> list[list[int]]:
        lines, tokenizer = [pair[side] for pair in pairs], vocabulary[side]
        if is_filtered and config.bpe_dropout:
            return tokenizer.sample(lines, config.bpe_dropout, (2 * first + side) % 2**32)
        return tokenizer.encode(lines)

    encoded = list(zip(encode(0), encode(1), strict=True))
    if is_filtered:
        encoded = _drop_unfit(
            encoded, lambda s, t: why_unfit_tokens(len(s), len(t), config), outcome
        )
    outcome["kept"] += len(encoded)
    for i, side in enumerate(SIDES):
        sequences = [pair[i] for pair in encoded]
        dtype = token_dtype(getattr(vocabulary, side))
        flat = np.fromiter(itertools.chain.from_iterable(sequences), dtype)
        content[side, "tokens"] = flat.tobytes()
        content[side, "lengths"] = np.asarray([*map(len, sequences)], LENGTH).tobytes()
        if not is_filtered:
            content[side, "txt"] = "".join(f"{pair[i]}\n" for pair in pairs).encode()
    return Encoded(num_pairs, outcome, content)


def _drop_unfit(
    pairs: Sequence[tuple[T, T]], find_reason: Callable[[T, T], str | None], outcome: Counter[str]
) -> list[tuple[T, T]]:
    """Return the pairs to keep, and add the dropped pairs to the counts in `outcome`."""
    reasons = [find_reason(*pair) for pair in pairs]
    outcome.update(filter(None, reasons))
    return [pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None]


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield lists of pairs, because SentencePiece encodes lists faster than single lines."""
    chunk, characters = list[tuple[str, str]](), 0
    for source, target in pairs:
        chunk.append((source, target))
        characters += len(source) + len(target)
        if len(chunk) == CHUNK_PAIRS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = list[tuple[str, str]](), 0
    if chunk:
        yield chunk
