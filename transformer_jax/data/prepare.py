"""Encode a corpus once and cache the result: a vocabulary and flat files of token ids.

<cache>/vocabularies/<digest of text and size>.{model,sha256}
<cache>/corpora/<digest of text, vocabulary, and limits>/
    report.json                     pairs read, kept, and dropped by reason; sizes; fingerprint
    files of `encode`               tokens and lengths; lines of dev and test

Text is read in chunks, so memory use does not grow with its size. An interrupted preparation
resumes.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data.batches import Batches, Ragged
from transformer_jax.data.corpora import CORPORA, Corpus
from transformer_jax.data.encode import (
    CHUNK_PAIRS,
    LENGTH,
    SIDES,
    Progress,
    SplitWriter,
    ignore_progress,
    token_dtype,
    unfit_text,
)
from transformer_jax.data.splits import Split
from transformer_jax.data.tokenizer import MAX_TRAINING_LINE, Tokenizer, Vocabulary
from transformer_jax.errors import DataError, StorageError, UsageError

# This number is part of every digest. Increase it when the format of the stored files changes, so
# that old caches are ignored.
FORMAT = 6
# Limits on the sample that a tokenizer is trained on, which SentencePiece keeps in memory. The
# sample is spread evenly over the text.
SAMPLE_PAIRS = 500_000
SAMPLE_BYTES = 1 << 28


class Prepared(NamedTuple):
    """An encoded corpus in the cache."""

    folder: Path
    vocabulary: Vocabulary
    report: dict[str, Any]
    """The contents of report.json."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all tokens and lines. Equal data have equal fingerprints on any machine."""
        return self.report["fingerprint"]

    def tokens(self, split: Split) -> tuple[Ragged, Ragged]:
        """Return the tokens of all sources and of all targets, memory-mapped from disk.

        Raises:
            UsageError: the corpus has no such split.
        """
        self._check_has(split)
        source, target = (self._ragged(split, side) for side in SIDES)
        return source, target

    def lines(self, split: Split) -> tuple[list[str], list[str]]:
        """Return the source lines and the target lines of dev or test, not tokenized.

        Raises:
            UsageError: the corpus has no such split.
        """
        self._check_has(split)
        source, target = (
            # Only "\n" ends a line: `splitlines` would also split at U+2028 and other symbols.
            (self.folder / f"{split}.{side}.txt").read_bytes().decode().split("\n")[:-1]
            for side in SIDES
        )
        return source, target

    def batches(self, batch_tokens: int, seed: int) -> Batches:
        """Plan the batches of the training split."""
        return Batches(*self.tokens("train"), batch_tokens=batch_tokens, seed=seed)

    def _check_has(self, split: Split) -> None:
        if split not in self.report:
            raise UsageError(f"the corpus has no {split} split: it was prepared without one")

    def _ragged(self, split: Split, side: str) -> Ragged:
        name = f"{split}.{side}"
        lengths = np.fromfile(self.folder / f"{name}.lengths", LENGTH)
        dtype = token_dtype(getattr(self.vocabulary, side))
        tokens = np.memmap(self.folder / f"{name}.tokens", dtype, "r")
        return Ragged(tokens, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def prepare(
    config: DataConfig,
    vocabulary: Vocabulary | None = None,
    *,
    progress: Progress = ignore_progress,
) -> Prepared:
    """Encode the config's corpus, or find it in the cache.

    Args:
        config: the corpus, the vocabulary size, and the limits on pairs.
        vocabulary: a trained vocabulary; None trains one on the corpus.
        progress: called while text is read and encoded, and while the vocabulary is trained.

    Raises:
        UsageError: the config does not say where the text is.
        DataError: the text cannot be used.
        StorageError: the cache cannot be written.
    """
    with _storage_errors():
        corpora = cache_folder("corpora")
        corpus = CORPORA[config.corpus](config)
        identity = corpus.identity
        vocabulary = vocabulary or _train_vocabulary(corpus, identity, config, progress)
        tokenizers = [tokenizer.digest for tokenizer in vocabulary.tokenizers.values()]
        folder = corpora / _digest(identity, *tokenizers, config.max_length, config.max_ratio)
        report = _read_report(folder)
        if report is None:
            with _exclusive(folder, progress):
                report = _read_report(folder)
                report = report or _encode(folder, corpus, vocabulary, config, progress)
    return Prepared(folder, vocabulary, report)


def find_prepared(
    config: DataConfig,
    vocabulary: Vocabulary,
    fingerprint: str,
    *,
    verify_text: bool = False,
    progress: Progress = ignore_progress,
) -> Prepared:
    """Find the data that a run was created with, or encode it again if it is not in the cache.

    Args:
        config: the data section of the run's config.
        vocabulary: the run's vocabulary.
        fingerprint: `Prepared.fingerprint` of the run's data.
        verify_text: whether to read the text again even if the cache already has this fingerprint.
        progress: called while text is read and encoded.

    Raises:
        UsageError: the config does not say where the text is.
        DataError: the text cannot be used, or has a different fingerprint.
        StorageError: the cache cannot be written.
    """
    if not verify_text:
        with _storage_errors():
            # Unfinished corpora and lock files have a suffix.
            for folder in sorted(x for x in cache_folder("corpora").iterdir() if not x.suffix):
                report = _read_report(folder)
                if report is not None and report["fingerprint"] == fingerprint:
                    return Prepared(folder, vocabulary, report)
    prepared = prepare(config, vocabulary, progress=progress)
    if prepared.fingerprint != fingerprint:
        raise DataError(
            f"{prepared.report['corpus']} is not the text that the run began with, or its limits "
            "changed: restore that text and those limits, or start a new run"
        )
    return prepared


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write the corpus to the cache: {error}") from error


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def _read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of a complete corpus, or None."""
    try:
        report = json.loads((folder / "report.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in report["sizes"]}
        is_complete = sizes == report["sizes"] and bool(report["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if is_complete else None


@contextmanager
def _exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock, so that only one process writes at a time; the lock ends with its process."""
    with folder.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same text", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _train_vocabulary(
    corpus: Corpus, identity: str, config: DataConfig, progress: Progress
) -> Vocabulary:
    def train(vocab_size: int, *sides: str) -> Tokenizer:
        return _train_tokenizer(corpus, identity, vocab_size, sides, progress)

    if config.source_vocab_size is None:
        return Vocabulary.shared(train(config.vocab_size, *SIDES))
    return Vocabulary(train(config.source_vocab_size, "source"), train(config.vocab_size, "target"))


def _train_tokenizer(
    corpus: Corpus, identity: str, vocab_size: int, sides: tuple[str, ...], progress: Progress
) -> Tokenizer:
    """Train a tokenizer on these sides of the corpus, or load it from the cache."""
    name = _digest(identity, vocab_size, *sides)
    path = cache_folder("vocabularies") / f"{name}.model"
    tokenizer = _load_cached_tokenizer(path)
    if tokenizer is None:
        with _exclusive(path, progress):
            tokenizer = _load_cached_tokenizer(path)
            if tokenizer is None:
                tokenizer = Tokenizer.train(_sample(corpus, sides, progress), vocab_size)
                temporary, digest = path.with_suffix(".tmp"), path.with_suffix(".sha256")
                for file, content in ((path, tokenizer.model), (digest, tokenizer.digest.encode())):
                    temporary.write_bytes(content)
                    temporary.replace(file)
    return tokenizer


def _load_cached_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of a complete model file, or None."""
    try:
        tokenizer = Tokenizer.load(path)
        digest = path.with_suffix(".sha256").read_bytes()
    except (FileNotFoundError, DataError):
        return None
    # A truncated file can be a valid, smaller model, so compare the digests.
    return tokenizer if digest == tokenizer.digest.encode() else None


def _verify_text(corpus: Corpus, progress: Progress) -> None:
    """Read every line once, so that an error in any file is raised before the long work starts."""
    progress("reading", 0, 0)
    for split in corpus.splits:
        corpus.count(split)


def _sample(corpus: Corpus, sides: tuple[str, ...], progress: Progress) -> Iterator[str]:
    """Yield the lines that a tokenizer is trained on, which depend only on the text."""
    _verify_text(corpus, progress)
    total = corpus.count("train")

    def every_nth(n: int, activity: str) -> Iterator[str]:
        for index, pair in enumerate(corpus.read("train")):
            if index % CHUNK_PAIRS == 0:
                progress(activity, index, total)
            if index % n == 0 and unfit_text(*pair) is None:
                for side, line in zip(SIDES, pair, strict=True):
                    if side in sides and len(line.encode()) <= MAX_TRAINING_LINE:
                        yield line

    n = -(-total // SAMPLE_PAIRS)
    size = sum(len(line.encode()) for line in every_nth(n, "sampling lines for the vocabulary"))
    if not size:
        raise DataError(
            f"there is nothing to learn a vocabulary from: all {total} pairs of {corpus.name} are "
            f"empty, longer than {MAX_TRAINING_LINE} bytes, or contain control symbols"
        )
    return every_nth(n * -(-size // SAMPLE_BYTES), "training the vocabulary")


def _encode(
    folder: Path, corpus: Corpus, vocabulary: Vocabulary, config: DataConfig, progress: Progress
) -> dict[str, Any]:
    """Encode all splits, then rename the finished folder into place; return its report."""
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    report: dict[str, Any] = {"corpus": corpus.name, **vocabulary.describe()}
    _verify_text(corpus, progress)
    writers = [SplitWriter(partial, corpus, split, vocabulary, config) for split in corpus.splits]
    for writer in writers:
        report[writer.split] = writer.write(progress)
    files = sorted(path for writer in writers for path in writer.paths.values())
    report["sizes"] = {path.name: path.stat().st_size for path in files}
    report["fingerprint"] = _compute_fingerprint(files)
    (partial / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    # Remove the journals last, so that an interruption before this line does not lose encoded
    # pairs.
    for journal in partial.glob("*.journal.*"):
        journal.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return report


def _compute_fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
