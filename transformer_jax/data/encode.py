"""Encode lines as token ids in flat files, chunk by chunk; count and drop unfit pairs.

{train,dev,test}.{source,target}.{tokens,lengths}   little-endian integers
{dev,test}.{source,target}.txt                      the lines
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import Corpus
from transformer_jax.data.splits import Split
from transformer_jax.data.text_files import MAX_LINE_BYTES, is_too_long
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError

T = TypeVar("T")

SIDES = ("source", "target")
# A chunk ends when it reaches either of these limits. A token takes 36 bytes in a list of Python
# integers.
CHUNK_PAIRS = 4096
CHUNK_CHARACTERS = 1 << 21
LENGTH = np.dtype("<u4")

# Symbols that no sentence may contain: control characters except the tab, line ends other than
# "\n", byte-order marks, and the symbols that SentencePiece reserves.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ufeff\u2581\u2585]|<(?:pad|s|/s|unk)>")

Progress = Callable[[str, int, int], None]
"""A callback for progress: `progress(activity, done, total)`; counts are in sentence pairs.

It is called about once per chunk. If the total is unknown, `total` is 0.
"""


def ignore_progress(_activity: str, _done: int, _total: int) -> None:
    """Report nothing."""


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest integer type that holds every token id."""
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def unfit_text(source: str, target: str) -> str | None:
    """Return the reason to leave this pair of lines out of training, or None."""
    if not source.strip() or not target.strip():
        return "empty"
    if is_too_long(source) or is_too_long(target):
        return "too long"
    if CONTROL.search(source) or CONTROL.search(target):
        return "control symbols"
    return None


def unfit_tokens(source: int, target: int, config: DataConfig) -> str | None:
    """Return the reason to leave a pair out of training, or None.

    Args:
        source: number of source tokens, including EOS.
        target: number of target tokens, including EOS.
        config: the limits on length and ratio.
    """
    shorter, longer = sorted((source - 1, target - 1))
    if shorter == 0:
        return "empty"
    if longer + 1 > config.max_length:
        return "too long"
    return "ratio" if longer > config.max_ratio * shorter else None


class SplitWriter:
    """Writes the files of one split. Writing resumes after an interruption."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        split: Split,
        vocabulary: Vocabulary,
        config: DataConfig,
    ) -> None:
        """Choose the paths of the split's files in `folder`, but write nothing yet."""
        self.corpus, self.split, self.config = corpus, split, config
        self.vocabulary = vocabulary
        # Only the training split is filtered: dev and test are scored as a whole.
        self.is_filtered = split == "train"
        kinds = ["tokens", "lengths"] if self.is_filtered else ["tokens", "lengths", "txt"]
        self.paths = {
            (side, kind): folder / f"{split}.{side}.{kind}" for side in SIDES for kind in kinds
        }
        self.journal = folder / f"{split}.journal.json"

    def write(self, progress: Progress) -> dict[str, int]:
        """Encode the split.

        Returns:
            The number of pairs, how many were kept, and how many were dropped for each reason.

        Raises:
            DataError: no pair is left, or a line of dev or test is too long.
        """
        total = self.corpus.count(self.split)
        done, outcome = self._resume()
        with ExitStack() as stack:
            self.files = {
                key: stack.enter_context(path.open("ab")) for key, path in self.paths.items()
            }
            for sources, targets in _chunks(self.corpus.read(self.split, done)):
                outcome.update(self._write_chunk(sources, targets))
                done += len(sources)
                progress(f"encoding {self.split}", done, total)
                self._write_journal(done, outcome)
        if not outcome["kept"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (+outcome).items())
            raise DataError(
                f"{self.corpus.name}: none of the {total} pairs is fit for training: {reasons} "
                f"(data.max_length {self.config.max_length}, data.max_ratio "
                f"{self.config.max_ratio:g})"
            )
        return {"pairs": done, **outcome}

    def _write_chunk(self, sources: list[str], targets: list[str]) -> Counter[str]:
        """Append fit pairs to the files; count the kept pairs and, by reason, the dropped pairs."""
        outcome = Counter[str]()
        if self.is_filtered:
            reasons = [unfit_text(*pair) for pair in zip(sources, targets, strict=True)]
            sources, targets = _fit(sources, reasons), _fit(targets, reasons)
            outcome.update(filter(None, reasons))
        else:
            self._check_line_lengths(sources, targets)
        encoded = self.vocabulary.source.encode(sources), self.vocabulary.target.encode(targets)
        if self.is_filtered:
            reasons = [
                unfit_tokens(len(s), len(t), self.config) for s, t in zip(*encoded, strict=True)
            ]
            encoded = _fit(encoded[0], reasons), _fit(encoded[1], reasons)
            outcome.update(filter(None, reasons))
        outcome["kept"] += len(encoded[0])
        for side, sequences, lines in zip(SIDES, encoded, (sources, targets), strict=True):
            dtype = token_dtype(getattr(self.vocabulary, side))
            flat = np.fromiter(itertools.chain.from_iterable(sequences), dtype)
            self.files[side, "tokens"].write(flat.tobytes())
            self.files[side, "lengths"].write(np.asarray([*map(len, sequences)], LENGTH).tobytes())
            if not self.is_filtered:
                self.files[side, "txt"].write("".join(f"{line}\n" for line in lines).encode())
        return outcome

    def _check_line_lengths(self, sources: list[str], targets: list[str]) -> None:
        for line in itertools.chain(sources, targets):
            if is_too_long(line):
                raise DataError(
                    f"{self.split} of {self.corpus.name} has a line of more than {MAX_LINE_BYTES} "
                    f"bytes, which begins {line[:40]!r}"
                )

    def _write_journal(self, done: int, outcome: Counter[str]) -> None:
        """Record the progress and the size of each file, so that encoding can resume."""
        for file in self.files.values():
            file.flush()
        sizes = [path.stat().st_size for path in self.paths.values()]
        temporary = self.journal.with_suffix(".tmp")
        temporary.write_text(json.dumps({"done": done, "outcome": outcome, "sizes": sizes}))
        temporary.replace(self.journal)

    def _resume(self) -> tuple[int, Counter[str]]:
        """Truncate the files to the sizes in the journal; return the progress recorded there."""
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
            with path.open("r+b") as file:
                file.truncate(size)
        return done, outcome


def _fit(items: list[T], reasons: list[str | None]) -> list[T]:
    """Return the items that have no reason to be dropped."""
    return [item for item, reason in zip(items, reasons, strict=True) if reason is None]


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield sources and targets in chunks: SentencePiece encodes lists faster than lines."""
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
