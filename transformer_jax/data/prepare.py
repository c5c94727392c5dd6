"""Encode a corpus once and cache the result as flat files of token IDs.

    <cache>/corpora/<digest of text, vocabulary, and limits>/
        report.json          pair counts (total, kept, and per drop reason); file sizes;
                             fingerprint of the files; digest of the report
        files of `encode`    tokens and lengths; lines of dev and test

Text is read in chunks, so memory use does not grow with the size of the text. If preparation
is interrupted, it resumes where it stopped. When a process first uses a cached corpus, it checks
the corpus's fingerprint. A damaged corpus is encoded again.
"""

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

from transformer_jax.cache import cache_folder
from transformer_jax.config import Config, DataConfig
from transformer_jax.config.sections import MAX_BATCH_SHAPES
from transformer_jax.config.validation import checked
from transformer_jax.data.batches import Batches, Ragged
from transformer_jax.data.corpora import CORPORA, Corpus
from transformer_jax.data.encode import SIDES, SplitWriter, read_tokens
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.data.unknown import note_unknown
from transformer_jax.data.vocabulary import digest, lock, train_vocabulary, verify_every_line
from transformer_jax.errors import DataError, StorageError, storage_errors
from transformer_jax.files import JsonObject, read_json, write_json
from transformer_jax.progress import note
from transformer_jax.registry import describe_foreign

# If less than this fraction of the training pairs can be used, the text or the limits may be wrong.
MIN_KEPT = 0.9


class Prepared(NamedTuple):
    """An encoded corpus in the cache."""

    folder: Path
    vocabulary: Vocabulary
    report: JsonObject
    """The contents of report.json."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all tokens and lines, which is the same on every machine."""
        return self.report["fingerprint"]

    def tokens(self, split: Split) -> tuple[Ragged, Ragged]:
        """Return the source and target tokens of a split, as memory maps.

        `report` must list the split.
        """
        source = read_tokens(self.folder, split, "source", self.vocabulary.source)
        return source, read_tokens(self.folder, split, "target", self.vocabulary.target)

    def lines(self, split: Split) -> tuple[list[str], list[str]]:
        """Return the source and target lines of the dev or test split, which `report` must list."""
        paths = (self.folder / f"{split}.{side}.txt" for side in SIDES)
        # Only "\n" ends a line; `splitlines` would also split at other characters, such as U+2028.
        source, target = (path.read_bytes().decode().split("\n")[:-1] for path in paths)
        return source, target

    def note_problems(self) -> None:
        """Issue notes if many training pairs were dropped, or if the vocabulary lacks some text."""
        counts = dict(self.report["train"])
        pairs, kept = counts.pop("pairs"), counts.pop("kept")
        if kept < MIN_KEPT * pairs:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            note(f"training uses only {kept:,} of {pairs:,} pairs; dropped: {reasons}")
        for split in (split for split in SPLITS if split in self.report):
            lines = ([], []) if split == "train" else self.lines(split)
            sides = zip(SIDES, self.vocabulary, lines, self.tokens(split), strict=True)
            for side, tokenizer, text, tokens in sides:
                note_unknown(f"{split} {side}", tokenizer, text, tokens)

    def batches(self, config: Config) -> Batches:
        """Plan the batches of the training split."""
        data = config.with_batch_shapes().data
        return Batches(
            *self.tokens("train"),
            batch_tokens=data.batch_tokens,
            seed=config.train.seed,
            max_shapes=data.max_batch_shapes or MAX_BATCH_SHAPES,
        )


@checked
@storage_errors("cannot write the corpus to the cache")
def prepare_text(config: DataConfig, vocabulary: Vocabulary | None = None) -> Prepared:
    """Encode the config's corpus, or load it from the cache.

    If `vocabulary` is None, train a vocabulary or load it from the cache.

    Raises:
        UsageError: the config does not specify the text.
        DataError: the text cannot be used.
        StorageError: the text cannot be downloaded, or the cache cannot be written.
    """
    corpora = cache_folder("corpora")
    corpus = CORPORA[config.corpus](config)
    for split in ("train", "dev"):
        if split not in corpus.splits:
            raise DataError(f"{corpus.name} has no {split} split, which training needs")
    # If the file that registers a corpus changes, the lines of the corpus may change.
    part = describe_foreign({"data.corpus": config.corpus}).get("data.corpus", {})
    identity = corpus.identity + part.get("sha256", "")
    vocabulary = vocabulary or train_vocabulary(corpus, identity, config)
    tokenizers = [tokenizer.digest for tokenizer in vocabulary.tokenizers.values()]
    sampling = (config.bpe_dropout, config.bpe_dropout_samples) if config.bpe_dropout else ()
    limits = config.max_length, config.max_ratio
    folder = corpora / digest(identity, *tokenizers, *limits, *sampling)
    if (report := _read_intact(folder, vocabulary)) is None:
        with lock(folder):
            report = _read_intact(folder, vocabulary)
            report = report or _encode(folder, corpus, vocabulary, config)
    # Equal text can have been prepared from another place.
    return Prepared(folder, vocabulary, {**report, "corpus": corpus.name})


@storage_errors("cannot write the corpus to the cache")
def find_prepared(
    config: DataConfig, vocabulary: Vocabulary, fingerprint: str, *, verify_text: bool = False
) -> Prepared:
    """Load a run's data from the cache or, if it is not there, encode the text again.

    If `verify_text` is true, read the text even if its data is in the cache, and check that the
    text has not changed.
    """
    if not verify_text:
        # Only the names of unfinished corpora and lock files have a suffix.
        for folder in sorted(x for x in cache_folder("corpora").iterdir() if not x.suffix):
            report = _read_report(folder)
            is_same = report is not None and report["fingerprint"] == fingerprint
            if is_same and (report := _read_intact(folder, vocabulary)) is not None:
                return Prepared(folder, vocabulary, report)
    prepared = prepare_text(config, vocabulary)
    if prepared.fingerprint != fingerprint:
        raise DataError(
            f"{prepared.report['corpus']} is not the text that the run was created with, or its "
            "limits have changed: restore that text and those limits, or start a new run"
        )
    return prepared


def _read_report(folder: Path) -> JsonObject | None:
    """Return the report in a folder, or None if the folder has no complete corpus."""
    try:
        report = read_json(folder / "report.json")
        sizes = {name: (folder / name).stat().st_size for name in report["sizes"]}
        is_complete = sizes == report["sizes"] and "fingerprint" in report
    except (OSError, StorageError, KeyError, TypeError):
        return None
    return report if is_complete else None


# The cached corpora that this process has verified: the folder, the fingerprint, and the
# modification times.
VERIFIED: set[tuple[object, ...]] = set()


def _read_intact(folder: Path, vocabulary: Vocabulary) -> JsonObject | None:
    """Return the report in a folder, or None if there is no corpus or its files are damaged."""
    if (report := _read_report(folder)) is None:
        return None
    files = sorted(folder / name for name in report["sizes"])
    key = folder, report["fingerprint"], *(path.stat().st_mtime_ns for path in files)
    if key not in VERIFIED:
        if _compute_fingerprint(files) != report["fingerprint"]:
            note(f"the cached text in {folder} is damaged, so it is not used")
            return None
        prepared = Prepared(folder, vocabulary, report)
        for split in (split for split in SPLITS if split in report):
            for tokens, tokenizer in zip(prepared.tokens(split), vocabulary, strict=True):
                if len(tokens.flat) and int(tokens.flat.max()) >= len(tokenizer):
                    note(f"the cached text in {folder} has unknown token IDs, so it is not used")
                    return None
        VERIFIED.add(key)
    return report


def _encode(folder: Path, corpus: Corpus, vocabulary: Vocabulary, config: DataConfig) -> JsonObject:
    """Encode all splits into a partial folder, then rename the folder and return its report."""
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    report: JsonObject = {"corpus": corpus.name, **vocabulary.describe()}
    verify_every_line(corpus)
    writers = [SplitWriter(partial, corpus, split, vocabulary, config) for split in corpus.splits]
    for writer in writers:
        report[writer.split] = writer.write()
    files = sorted(path for writer in writers for path in writer.paths.values())
    report["sizes"] = {path.name: path.stat().st_size for path in files}
    report["fingerprint"] = _compute_fingerprint(files)
    write_json(partial / "report.json", report)
    # Remove the journals last, so that an interruption before this point loses no encoded pairs.
    for journal in partial.glob("*.journal.*"):
        journal.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return report


def _compute_fingerprint(files: list[Path]) -> str:
    checksum = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            checksum.update(path.name.encode() + b"\0")
            checksum.update(hashlib.file_digest(file, "sha256").digest())
    return checksum.hexdigest()
