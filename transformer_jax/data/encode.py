"""Lines become pieces in flat arrays, chunk by chunk; unfit pairs are counted and left out.

{train,dev,test}.{source,target}.{pieces,lengths}   little-endian integers
{dev,test}.{source,target}.txt                      the lines
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import Corpus
from transformer_jax.data.splits import Split
from transformer_jax.data.text_files import MAX_LINE_BYTES, is_too_long
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import DataError

SIDES = ("source", "target")
# So much text is encoded at a time, whichever comes first: a piece takes 36 bytes in Python.
CHUNK_PAIRS = 4096
CHUNK_CHARACTERS = 1 << 21
LENGTH = np.dtype("<u4")

# What no sentence holds: control characters and line ends that are not "\n" (a tab is allowed),
# marks in the middle of text, and what SentencePiece has for itself.
CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ufeff\u2581\u2585]|<(?:pad|s|/s|unk)>")

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many pairs of how many are done."""


def ignore_progress(_doing: str, _done: int, _total: int) -> None:
    """Show no progress."""


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest integer that holds any piece."""
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def unfit_text(source: str, target: str) -> str | None:
    """Return why these two lines are not to be trained on, if so."""
    if not source.strip() or not target.strip():
        return "empty"
    if is_too_long(source) or is_too_long(target):
        return "too long"
    if CONTROL.search(source) or CONTROL.search(target):
        return "control symbols"
    return None


def unfit_tokens(source: int, target: int, config: DataConfig) -> str | None:
    """Return why pairs of so many pieces, with their ends, are not to be trained on, if so."""
    shorter, longer = sorted((source - 1, target - 1))
    if shorter == 0:
        return "empty"
    if longer + 1 > config.max_length:
        return "too long"
    return "ratio" if longer > config.max_ratio * shorter else None


class SplitWriter:
    """Writes one split; what was written by an interrupted one before is gone on with."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        split: Split,
        vocabulary: Vocabulary,
        config: DataConfig,
    ) -> None:
        self.corpus, self.split, self.config = corpus, split, config
        self.vocabulary = vocabulary
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
        pieces = self.vocabulary.source.encode(sources), self.vocabulary.target.encode(targets)
        if self.is_filtered:
            reasons = [
                unfit_tokens(len(s), len(t), self.config) for s, t in zip(*pieces, strict=True)
            ]
            fit = [i for i, reason in enumerate(reasons) if reason is None]
            pieces = tuple([side[i] for i in fit] for side in pieces)
            outcome += Counter(reason for reason in reasons if reason is not None)
        outcome["kept"] += len(pieces[0])
        for side, rows, lines in zip(SIDES, pieces, (sources, targets), strict=True):
            dtype = token_dtype(getattr(self.vocabulary, side))
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
