"""From text to pieces, once: a vocabulary and flat arrays, kept in the cache by digest.

<cache>/vocabularies/<digest of text and size>.{model,sha256}
<cache>/corpora/<digest of text, vocabulary and limits>/
    report.json                     lines read, kept, left out and why; sizes, fingerprint
    what `encode` writes            pieces, and the lines of dev and test

Text of any length goes through in chunks. What an interruption left behind is gone on with.
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

# Part of every digest: a change of what is stored makes it anew.
FORMAT = 5
# A vocabulary is learnt from at most so many pairs, spread evenly over the text, and from about
# so many bytes: SentencePiece holds them all in memory.
SAMPLE_PAIRS = 500_000
SAMPLE_BYTES = 1 << 28


class Prepared(NamedTuple):
    """A corpus as pieces, and where it lies."""

    folder: Path
    vocabulary: Vocabulary
    report: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all pieces and lines: the same in every run on the same data."""
        return self.report["fingerprint"]

    def tokens(self, split: Split) -> tuple[Ragged, Ragged]:
        """Return the pieces of all sources and of all targets, read from disk as needed.

        Raises:
            UsageError: the corpus has no such split.
        """
        self._check_has(split)
        source, target = (self._ragged(split, side) for side in SIDES)
        return source, target

    def lines(self, split: Split) -> tuple[list[str], list[str]]:
        """Return the sources and the targets of dev or test as they were before any tokenizer.

        Raises:
            UsageError: the corpus has no such split.
        """
        self._check_has(split)
        source, target = (
            # Only "\n" ends a line: `splitlines` would break at U+2028 and others.
            (self.folder / f"{split}.{side}.txt").read_bytes().decode().split("\n")[:-1]
            for side in SIDES
        )
        return source, target

    def batches(self, batch_tokens: int, seed: int) -> Batches:
        """Return the training set's batches."""
        return Batches(*self.tokens("train"), batch_tokens=batch_tokens, seed=seed)

    def _check_has(self, split: Split) -> None:
        if split not in self.report:
            raise UsageError(f"the corpus has no {split} set; it was prepared without one")

    def _ragged(self, split: Split, side: str) -> Ragged:
        name = f"{split}.{side}"
        lengths = np.fromfile(self.folder / f"{name}.lengths", LENGTH)
        dtype = token_dtype(getattr(self.vocabulary, side))
        pieces = np.memmap(self.folder / f"{name}.pieces", dtype, "r")
        return Ragged(pieces, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def prepare(
    config: DataConfig,
    vocabulary: Vocabulary | None = None,
    fingerprint: str | None = None,
    *,
    verify_text: bool = False,
    progress: Progress = ignore_progress,
) -> Prepared:
    """Return the config's corpus as pieces, from the cache where it is there already.

    Args:
        config: which text, how many pieces, which limits.
        vocabulary: one to use in place of learning one: that of an earlier run.
        fingerprint: of the earlier run's data, which must be the same.
        is_text_moved: whether to look at the text also where the cache has that of the fingerprint.
        progress: told of what takes long.

    Raises:
        DataError: the text cannot be used, or is not that of the fingerprint.
        UsageError: the config does not say where it is.
        StorageError: the cache cannot be written.
    """
    try:
        home = cache_folder("corpora")
        if vocabulary is not None and fingerprint is not None and not verify_text:
            # Those in the making have a suffix.
            for folder in sorted(path for path in home.iterdir() if not path.suffix):
                report = _report(folder)
                if report is not None and report["fingerprint"] == fingerprint:
                    return Prepared(folder, vocabulary, report)
        corpus = CORPORA[config.corpus](config)
        identity = corpus.identity
        vocabulary = vocabulary or _vocabulary(corpus, identity, config, progress)
        limits = config.max_length, config.max_ratio
        folder = home / _digest(
            identity, *(part.digest for part in vocabulary.tokenizers.values()), *limits
        )
        report = _report(folder)
        if report is None:
            with _exclusive(folder, progress):
                report = _report(folder) or _write(folder, corpus, vocabulary, config, progress)
    except OSError as error:
        raise StorageError(f"the corpus could not be kept in the cache: {error}") from error
    if fingerprint not in (None, report["fingerprint"]):
        raise DataError(
            f"{report['corpus']} is not the text that the run began with, or was not prepared "
            f"as then: bring that text back, or begin a new run"
        )
    return Prepared(folder, vocabulary, report)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def _report(folder: Path) -> dict[str, Any] | None:
    """Return the report of a corpus that is there and whole, or None."""
    try:
        report = json.loads((folder / "report.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in report["sizes"]}
        is_whole = sizes == report["sizes"] and bool(report["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if is_whole else None


@contextmanager
def _exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time make a corpus; a process that dies makes way."""
    with folder.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same text", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _vocabulary(
    corpus: Corpus, identity: str, config: DataConfig, progress: Progress
) -> Vocabulary:
    def learnt(vocab_size: int, *sides: str) -> Tokenizer:
        return _tokenizer(corpus, identity, vocab_size, sides, progress)

    if config.source_vocab_size is None:
        return Vocabulary.shared(learnt(config.vocab_size, *SIDES))
    return Vocabulary(
        learnt(config.source_vocab_size, "source"), learnt(config.vocab_size, "target")
    )


def _tokenizer(
    corpus: Corpus, identity: str, vocab_size: int, sides: tuple[str, ...], progress: Progress
) -> Tokenizer:
    name = _digest(identity, vocab_size, *sides)
    path = cache_folder("vocabularies") / f"{name}.model"
    tokenizer = _load_cached_tokenizer(path)
    if tokenizer is None:
        with _exclusive(path, progress):
            tokenizer = _load_cached_tokenizer(path)
            if tokenizer is None:
                tokenizer = Tokenizer.train(_sample(corpus, sides, progress), vocab_size)
                for file, content in (
                    (path, tokenizer.model),
                    (path.with_suffix(".sha256"), tokenizer.digest.encode()),
                ):
                    temporary = path.with_suffix(".tmp")
                    temporary.write_bytes(content)
                    temporary.replace(file)
    return tokenizer


def _load_cached_tokenizer(path: Path) -> Tokenizer | None:
    """Return a vocabulary that is there and whole, or None."""
    try:
        tokenizer = Tokenizer.load(path)
        digest = path.with_suffix(".sha256").read_bytes()
    except (FileNotFoundError, DataError):
        return None
    # The beginning of a model can pass for a smaller one.
    return tokenizer if digest == tokenizer.digest.encode() else None


def _verify_text(corpus: Corpus, progress: Progress) -> None:
    """Read every line once: a fault in any file is told before an hour's work."""
    progress("reading", 0, 0)
    for split in corpus.splits:
        corpus.count(split)


def _sample(corpus: Corpus, sides: tuple[str, ...], progress: Progress) -> Iterator[str]:
    """Return the lines that a vocabulary is learnt from: a function of the text alone."""
    _verify_text(corpus, progress)
    total = corpus.count("train")

    def lines(doing: str, step: int) -> Iterator[str]:
        for number, pair in enumerate(corpus.read("train")):
            if number % CHUNK_PAIRS == 0:
                progress(doing, number, total)
            if number % step == 0 and unfit_text(*pair) is None:
                for side, line in zip(SIDES, pair, strict=True):
                    if side in sides and len(line.encode()) <= MAX_TRAINING_LINE:
                        yield line

    step = -(-total // SAMPLE_PAIRS)
    size = sum(len(line.encode()) for line in lines("choosing what to learn from", step))
    if not size:
        raise DataError(
            f"there is nothing to learn a vocabulary from: all {total} pairs of {corpus.name} are "
            f"empty, longer than {MAX_TRAINING_LINE} bytes or hold control symbols"
        )
    return lines("learning a vocabulary", step * -(-size // SAMPLE_BYTES))


def _write(
    folder: Path, corpus: Corpus, vocabulary: Vocabulary, config: DataConfig, progress: Progress
) -> dict[str, Any]:
    """Make a corpus's folder, which then appears at once; return its report."""
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    report: dict[str, Any] = {
        "corpus": corpus.name,
        **vocabulary.describe(),
    }
    _verify_text(corpus, progress)
    writers = [SplitWriter(partial, corpus, split, vocabulary, config) for split in corpus.splits]
    for writer in writers:
        report[writer.split] = writer.run(progress)
    files = sorted(path for writer in writers for path in writer.paths.values())
    report["sizes"] = {path.name: path.stat().st_size for path in files}
    report["fingerprint"] = _fingerprint(files)
    (partial / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    # Not before: whoever is interrupted here has nothing to encode again.
    for journal in partial.glob("*.journal.*"):
        journal.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return report


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
