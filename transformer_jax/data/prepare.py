"""From text to pieces, once: a vocabulary and flat arrays, kept in the cache by digest.

<cache>/vocabularies/<digest of text and size>.model
<cache>/corpora/<digest of text, vocabulary and limits>/
    report.json                          lines read, kept, left out and why; fingerprint
    {train,dev,test}.{source,target}.*   pieces, and for dev and test the lines
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data.batches import Ragged
from transformer_jax.data.corpora import SOURCES, SPLITS, Corpus, Split
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import DataError, StorageError

# Part of every digest: a change of what is stored makes it anew.
FORMAT = 3
SIDES = ("source", "target")


class Prepared(NamedTuple):
    """A corpus as pieces, and where it lies."""

    folder: Path
    tokenizer: Tokenizer
    report: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all pieces and lines: the same in every run on the same data."""
        return self.report["fingerprint"]

    def pieces(self, split: Split) -> tuple[Ragged, Ragged]:
        """Return the pieces of all sources and of all targets, read from disk as needed."""
        source, target = (self._ragged(split, side) for side in SIDES)
        return source, target

    def lines(self, split: Split) -> tuple[list[str], list[str]]:
        """Return the sources and the targets of dev or test as they were before any tokenizer."""
        source, target = (
            # Only "\n" ends a line: `splitlines` would break at U+2028 and others.
            (self.folder / f"{split}.{side}.txt").read_text("utf-8").split("\n")[:-1]
            for side in SIDES
        )
        return source, target

    def _ragged(self, split: Split, side: str) -> Ragged:
        parts = (
            np.load(self.folder / f"{split}.{side}.{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in Ragged._fields
        )
        return Ragged(*parts)


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Prepared:
    """Return the config's corpus as pieces, from the cache where it is there already.

    Args:
        config: which text, how many pieces, which limits.
        tokenizer: one to use in place of learning one: that of an earlier run.

    Raises:
        DataError: the text cannot be used.
        StorageError: the cache cannot be written.
    """
    corpus = SOURCES[config.source](config)
    try:
        tokenizer = tokenizer or _vocabulary(corpus, config.vocab_size)
        digest = _digest(corpus.identity, tokenizer.digest, config.max_length)
        folder = cache_folder("corpora") / digest
        if not folder.exists():
            _write_atomically(folder, corpus, tokenizer, config.max_length)
        return Prepared(folder, tokenizer, json.loads((folder / "report.json").read_text("utf-8")))
    except OSError as error:
        raise StorageError(f"the corpus could not be kept in the cache: {error}") from error


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def _vocabulary(corpus: Corpus, vocab_size: int) -> Tokenizer:
    path = cache_folder("vocabularies") / f"{_digest(corpus.identity, vocab_size)}.model"
    if path.exists():
        return Tokenizer.load(path)
    lines = (line for pair in corpus.read("train") for line in pair)
    tokenizer = Tokenizer.learn(lines, vocab_size)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(tokenizer.model)
    os.replace(file.name, path)  # noqa: PTH105 - the name is a string
    return tokenizer


def _write_atomically(folder: Path, corpus: Corpus, tokenizer: Tokenizer, max_length: int) -> None:
    """Write a corpus folder that is either whole or not there."""
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        report: dict[str, Any] = {
            "corpus": corpus.identity,
            "bleu_tokenizer": corpus.bleu_tokenizer,
            "vocabulary": {"pieces": len(tokenizer), "sha256": tokenizer.digest},
        }
        for split in SPLITS:
            report[split] = _write_split(temporary, corpus, split, tokenizer, max_length)
        report["fingerprint"] = _fingerprint(temporary)
        (temporary / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was faster, with the same content.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_split(
    folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, max_length: int
) -> dict[str, int]:
    """Write one split; return how many pairs were kept, and left out for which reason.

    Only training pairs are left out: scores are of the whole development and test set.
    """
    outcome: Counter[str] = Counter()
    kept: list[tuple[list[int], list[int]]] = []
    for sources, targets in _chunks(corpus.read(split), 1024):
        pieces = zip(tokenizer.encode(sources), tokenizer.encode(targets), strict=True)
        for pair in pieces:
            reason = _unfit(pair, max_length) if split == "train" else None
            outcome[reason or "kept"] += 1
            if reason is None:
                kept.append(pair)
        if split != "train":
            for side, lines in zip(SIDES, (sources, targets), strict=True):
                with (folder / f"{split}.{side}.txt").open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
    if not kept:
        raise DataError(
            f"no pair of {split} is left of {outcome.total()}: "
            + ", ".join(f"{count} {reason}" for reason, count in outcome.items())
        )
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    for side, column in zip(SIDES, zip(*kept, strict=True), strict=True):
        for part, array in Ragged.of(list(column), dtype)._asdict().items():
            np.save(folder / f"{split}.{side}.{part}.npy", array, allow_pickle=False)
    return {"pairs": outcome.total(), **outcome}


def _chunks(pairs: Iterator[tuple[str, str]], size: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield sources and targets of so many pairs at a time: SentencePiece is faster on lists."""
    while chunk := list(itertools.islice(pairs, size)):
        yield [source for source, _ in chunk], [target for _, target in chunk]


def _unfit(pair: tuple[list[int], list[int]], max_length: int) -> str | None:
    lengths = [len(side) for side in pair]
    if min(lengths) <= 1:
        return "empty"
    return "too long" if max(lengths) > max_length else None


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0")
        if path.suffix == ".npy":
            # The numbers alone: the header is the writing library's.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(hashlib.sha256(np.ascontiguousarray(array).data).digest())
        else:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
