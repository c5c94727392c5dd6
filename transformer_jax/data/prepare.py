"""From text to pieces, once: a vocabulary and flat arrays, kept in the cache by digest.

<cache>/vocabularies/<digest of text and size>.model
<cache>/corpora/<digest of text, vocabulary and limits>/
    report.json                     lines read, kept, left out and why; sizes, fingerprint
    {train,dev,test}.{source,target}.{pieces,lengths}   little-endian integers
    {dev,test}.{source,target}.txt  the lines

Text of any length goes through in chunks. What an interruption left behind is gone on with.
"""

import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data.batches import Ragged
from transformer_jax.data.corpora import SOURCES, Corpus
from transformer_jax.data.splits import Split
from transformer_jax.data.textfiles import MAX_LINE_BYTES, is_too_long
from transformer_jax.data.tokenizer import LONGEST_TO_LEARN_FROM, Tokenizer
from transformer_jax.errors import DataError, StorageError, UsageError

# Part of every digest: a change of what is stored makes it anew.
FORMAT = 4
SIDES = ("source", "target")
# A vocabulary is learnt from at most so many pairs, spread evenly over the text.
SAMPLE_PAIRS = 500_000
# So much text is encoded at a time, whichever comes first: a piece takes 36 bytes in Python.
CHUNK_PAIRS = 4096
CHUNK_CHARACTERS = 1 << 21
LENGTH = np.dtype("<u4")

# What no sentence holds: control characters and line ends that are not "\n" (a tab is allowed),
# marks in the middle of text, and what SentencePiece has for itself.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ufeff\u2581\u2585]|<(?:pad|s|/s|unk)>")

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many pairs of how many are done."""


def say_nothing(_doing: str, _done: int, _total: int) -> None:
    """Show no progress."""


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

    def _check_has(self, split: Split) -> None:
        if split not in self.report:
            raise UsageError(f"the corpus has no {split} set; it was prepared without one")

    def _ragged(self, split: Split, side: str) -> Ragged:
        name = f"{split}.{side}"
        lengths = np.fromfile(self.folder / f"{name}.lengths", LENGTH)
        pieces = np.memmap(self.folder / f"{name}.pieces", _piece_type(self.tokenizer), "r")
        return Ragged(pieces, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    fingerprint: str | None = None,
    *,
    progress: Progress = say_nothing,
) -> Prepared:
    """Return the config's corpus as pieces, from the cache where it is there already.

    Args:
        config: which text, how many pieces, which limits.
        tokenizer: one to use in place of learning one: that of an earlier run.
        fingerprint: of the earlier run's data, which must be the same.
        progress: told of what takes long.

    Raises:
        DataError: the text cannot be used, or is not that of the fingerprint.
        UsageError: the config does not say where it is.
        StorageError: the cache cannot be written.
    """
    try:
        home = cache_folder("corpora")
        if tokenizer is not None and fingerprint is not None:
            # Those in the making have a suffix.
            for folder in sorted(path for path in home.iterdir() if not path.suffix):
                report = _report(folder)
                if report is not None and report["fingerprint"] == fingerprint:
                    return Prepared(folder, tokenizer, report)
        corpus = SOURCES[config.source](config)
        identity = corpus.identity
        tokenizer = tokenizer or _vocabulary(corpus, identity, config.vocab_size, progress)
        folder = home / _digest(identity, tokenizer.digest, config.max_length, config.max_ratio)
        report = _report(folder)
        if report is None:
            with _alone(folder, progress):
                report = _report(folder) or _write(folder, corpus, tokenizer, config, progress)
    except OSError as error:
        raise StorageError(f"the corpus could not be kept in the cache: {error}") from error
    if fingerprint not in (None, report["fingerprint"]):
        raise DataError(
            f"{report['corpus']} is not the text that the run began with, or was not prepared "
            f"as then: bring that text back, or begin a new run"
        )
    return Prepared(folder, tokenizer, report)


def unfit_text(source: str, target: str) -> str | None:
    """Return why these two lines are not to be trained on, if so."""
    if not source.strip() or not target.strip():
        return "empty"
    if is_too_long(source) or is_too_long(target):
        return "too long"
    if CONTROL.search(source) or CONTROL.search(target):
        return "control symbols"
    return None


def unfit_pieces(source: int, target: int, config: DataConfig) -> str | None:
    """Return why pairs of so many pieces, with their ends, are not to be trained on, if so."""
    shorter, longer = sorted((source - 1, target - 1))
    if shorter == 0:
        return "empty"
    if longer + 1 > config.max_length:
        return "too long"
    return "ratio" if longer > config.max_ratio * shorter else None


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def _piece_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


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
def _alone(folder: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time make a corpus; a process that dies makes way."""
    with folder.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same text", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _vocabulary(corpus: Corpus, identity: str, vocab_size: int, progress: Progress) -> Tokenizer:
    path = cache_folder("vocabularies") / f"{_digest(identity, vocab_size)}.model"
    tokenizer = _kept(path)
    if tokenizer is None:
        with _alone(path, progress):
            tokenizer = _kept(path)
            if tokenizer is None:
                tokenizer = Tokenizer.learn(_sample(corpus, progress), vocab_size)
                temporary = path.with_suffix(".tmp")
                with temporary.open("wb") as file:
                    file.write(tokenizer.model)
                    # Half a model can pass for a smaller one: after a power cut too it is whole.
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
    return tokenizer


def _kept(path: Path) -> Tokenizer | None:
    """Return a vocabulary that is there and whole, or None."""
    try:
        return Tokenizer.load(path)
    except (FileNotFoundError, DataError):
        return None


def _look_at_all(corpus: Corpus, progress: Progress) -> None:
    """Read every line once: a fault in any file is told before an hour's work."""
    progress("reading", 0, 0)
    for split in corpus.splits:
        corpus.count(split)


def _sample(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Return the lines that a vocabulary is learnt from: a function of the text alone."""
    _look_at_all(corpus, progress)
    total = corpus.count("train")
    step = -(-total // SAMPLE_PAIRS)

    def lines() -> Iterator[str]:
        for number, pair in enumerate(corpus.read("train")):
            if number % CHUNK_PAIRS == 0:
                progress("learning a vocabulary", number, total)
            if number % step == 0 and unfit_text(*pair) is None:
                yield from (line for line in pair if len(line.encode()) <= LONGEST_TO_LEARN_FROM)

    found = lines()
    first = next(found, None)
    if first is None:
        raise DataError(
            f"there is nothing to learn a vocabulary from: all {total} pairs of {corpus.name} are "
            f"empty, longer than {LONGEST_TO_LEARN_FROM} bytes or hold control symbols"
        )
    return itertools.chain([first], found)


def _write(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig, progress: Progress
) -> dict[str, Any]:
    """Make a corpus's folder, which then appears at once; return its report."""
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    report: dict[str, Any] = {
        "corpus": corpus.name,
        "vocabulary": {"pieces": len(tokenizer), "sha256": tokenizer.digest},
    }
    _look_at_all(corpus, progress)
    writers = [_Writer(partial, corpus, split, tokenizer, config) for split in corpus.splits]
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


class _Writer:
    """Writes one split; what was written by an interrupted one before is gone on with."""

    def __init__(
        self, folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, config: DataConfig
    ) -> None:
        self.corpus, self.split, self.config = corpus, split, config
        self.tokenizer = tokenizer
        # Scores are of whole sets: pairs are left out of the training set alone.
        self.is_filtered = split == "train"
        kinds = ["pieces", "lengths"] if self.is_filtered else ["pieces", "lengths", "txt"]
        self.paths = {
            (side, kind): folder / f"{split}.{side}.{kind}" for side in SIDES for kind in kinds
        }
        self.journal = folder / f"{split}.journal.json"

    def run(self, progress: Progress) -> dict[str, int]:
        """Write it; return how many pairs there are, were kept, and left out for which reason."""
        total = self.corpus.count(self.split)
        done, outcome = self._resume()
        with ExitStack() as stack:
            self.files = {
                key: stack.enter_context(path.open("ab")) for key, path in self.paths.items()
            }
            for sources, targets in _chunks(self.corpus.read(self.split, done)):
                outcome.update(self._write(sources, targets))
                done += len(sources)
                progress(f"encoding {self.split}", done, total)
                self._note(done, outcome)
        if not outcome["kept"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (+outcome).items())
            raise DataError(
                f"no pair of {self.corpus.name} is left to train on, of {total}: {reasons} "
                f"(data.max_length {self.config.max_length}, data.max_ratio "
                f"{self.config.max_ratio:g})"
            )
        return {"pairs": done, **outcome}

    def _write(self, sources: list[str], targets: list[str]) -> Counter[str]:
        """Write the pairs that are fit; return how many are, and why the others are not."""
        if self.is_filtered:
            reasons = [unfit_text(*pair) for pair in zip(sources, targets, strict=True)]
            fit = [i for i, reason in enumerate(reasons) if reason is None]
            sources, targets = [sources[i] for i in fit], [targets[i] for i in fit]
            outcome = Counter(reason for reason in reasons if reason is not None)
        else:
            outcome = Counter[str]()
            self._check_short(sources, targets)
        pieces = self.tokenizer.encode(sources), self.tokenizer.encode(targets)
        if self.is_filtered:
            reasons = [
                unfit_pieces(len(s), len(t), self.config) for s, t in zip(*pieces, strict=True)
            ]
            fit = [i for i, reason in enumerate(reasons) if reason is None]
            pieces = tuple([side[i] for i in fit] for side in pieces)
            outcome += Counter(reason for reason in reasons if reason is not None)
        outcome["kept"] += len(pieces[0])
        dtype = _piece_type(self.tokenizer)
        for side, rows, lines in zip(SIDES, pieces, (sources, targets), strict=True):
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype)
            self.files[side, "pieces"].write(flat.tobytes())
            self.files[side, "lengths"].write(np.asarray([*map(len, rows)], LENGTH).tobytes())
            if not self.is_filtered:
                self.files[side, "txt"].write("".join(f"{line}\n" for line in lines).encode())
        return outcome

    def _check_short(self, sources: list[str], targets: list[str]) -> None:
        for line in itertools.chain(sources, targets):
            if is_too_long(line):
                raise DataError(
                    f"{self.split} of {self.corpus.name} has a line of more than {MAX_LINE_BYTES} "
                    f"bytes, which begins {line[:40]!r}"
                )

    def _note(self, done: int, outcome: Counter[str]) -> None:
        """Note how far all files are written, so that the work can be gone on with there."""
        for file in self.files.values():
            file.flush()
        sizes = [path.stat().st_size for path in self.paths.values()]
        temporary = self.journal.with_suffix(".tmp")
        temporary.write_text(json.dumps({"done": done, "outcome": outcome, "sizes": sizes}))
        temporary.replace(self.journal)

    def _resume(self) -> tuple[int, Counter[str]]:
        """Cut the files back to where the journal knows them; return how far that is."""
        try:
            journal = json.loads(self.journal.read_bytes())
            sizes = dict(zip(self.paths.values(), journal["sizes"], strict=True))
            if any(path.stat().st_size < size for path, size in sizes.items()):
                raise ValueError("a file is shorter than its journal says")
            done, outcome = journal["done"], Counter[str](journal["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            done, outcome = 0, Counter[str]()
            sizes = dict.fromkeys(self.paths.values(), 0)
        for path, size in sizes.items():
            path.touch()
            with path.open("r+b") as file:
                file.truncate(size)
        return done, outcome


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield sources and targets of many pairs at a time: SentencePiece is faster on lists."""
    sources, targets, characters = list[str](), list[str](), 0
    for source, target in pairs:
        sources.append(source)
        targets.append(target)
        characters += len(source) + len(target)
        if len(sources) == CHUNK_PAIRS or characters >= CHUNK_CHARACTERS:
            yield sources, targets
            sources, targets, characters = list[str](), list[str](), 0
    if sources:
        yield sources, targets


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
