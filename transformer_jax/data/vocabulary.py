"""Train a vocabulary, or load it from `<cache>/vocabularies/<digest of text and options>.model`."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from transformer_jax import progress
from transformer_jax.cache import cache_folder
from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import Corpus
from transformer_jax.data.encode import CHUNK_PAIRS, SIDES, why_unfit_text
from transformer_jax.data.tokenizer import MAX_TRAINING_LINE, Tokenizer, Unit, Vocabulary
from transformer_jax.errors import DataError
from transformer_jax.files import exclusive, write_bytes, write_text

# Every cache digest includes `FORMAT`. Increase `FORMAT` when the cache format changes.
FORMAT = 6
# Limits on the size of a tokenizer's training text, which SentencePiece keeps in memory.
SAMPLE_PAIRS = 500_000
SAMPLE_BYTES = 1 << 28


def digest(*parts: object) -> str:
    """Return a short digest of the cache format version and the given JSON data."""
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def lock(path: Path) -> AbstractContextManager[object]:
    """Hold the lock file of a cache entry, so that only one process at a time writes the entry."""
    activity = "waiting for another process that is preparing the same text"
    return exclusive(path.with_suffix(".lock"), lambda: progress.report(activity))


def train_vocabulary(corpus: Corpus, identity: str, config: DataConfig) -> Vocabulary:
    """Train a vocabulary on a corpus, or load it from the cache; `identity` identifies the text."""

    def train(vocab_size: int, *sides: str, unit: Unit = "subwords") -> Tokenizer:
        # Without normalization, the digest does not include this option.
        changes = [] if config.normalization == "none" else [config.normalization]
        name = f"{digest(identity, vocab_size, *sides, unit, *changes)}.model"
        path = cache_folder("vocabularies") / name
        if (tokenizer := _load_cached_tokenizer(path)) is not None:
            return tokenizer
        with lock(path):
            if (tokenizer := _load_cached_tokenizer(path)) is not None:
                return tokenizer
            tokenizer = Tokenizer.train(
                _sample(corpus, sides), vocab_size, unit, config.normalization
            )
            write_bytes(path, tokenizer.model)
            write_text(path.with_suffix(".sha256"), tokenizer.digest)
            return tokenizer

    if config.source_vocab_size is None:
        return Vocabulary.share(train(config.vocab_size, *SIDES))
    source = train(config.source_vocab_size, "source")
    return Vocabulary(source, train(config.vocab_size, "target", unit=config.target_tokens))


def _load_cached_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer from a model file, or None if the file is missing or incomplete."""
    try:
        tokenizer = Tokenizer(path.read_bytes(), str(path))
        checksum = path.with_suffix(".sha256").read_bytes()
    except (FileNotFoundError, DataError):
        return None
    # A truncated file can be a valid, smaller model, so compare the digests.
    return tokenizer if checksum == tokenizer.digest.encode() else None


def verify_every_line(corpus: Corpus) -> None:
    """Read every line, so that file errors are raised before any long computation starts."""
    progress.report("reading")
    for split in corpus.splits:
        corpus.count(split)


def _sample(corpus: Corpus, sides: tuple[str, ...]) -> Iterator[str]:
    """Yield evenly spaced lines of the text for training a tokenizer."""
    verify_every_line(corpus)
    total = corpus.count("train")

    def every_nth(n: int, activity: str) -> Iterator[str]:
        for index, pair in enumerate(corpus.read("train")):
            if index % CHUNK_PAIRS == 0:
                progress.report(activity, index, total)
            if index % n == 0 and why_unfit_text(*pair) is None:
                for side, line in zip(SIDES, pair, strict=True):
                    if side in sides and len(line.encode()) <= MAX_TRAINING_LINE:
                        yield line

    n = -(-total // SAMPLE_PAIRS)
    size = sum(len(line.encode()) for line in every_nth(n, "sampling lines for the vocabulary"))
    if not size:
        raise DataError(
            f"there is no text to train a vocabulary on: all {total} pairs of {corpus.name} are "
            f"empty, longer than {MAX_TRAINING_LINE} bytes, or contain control symbols"
        )
    return every_nth(n * -(-size // SAMPLE_BYTES), "training the vocabulary")
