"""Scores by length: what a sweep's runs make of sentences longer than they were trained on.

All of it comes from what `evaluate` kept: `sentences.csv`, `hypothesis.txt`, `reference.txt`.
L is the longest sentence of training, in pieces with its end (data.max_length).
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from transformer_jax.console import shell_command
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.evaluate import sacrebleu_metrics, score
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.results import SeedStatistics
from transformer_jax.sweeps.status import read_status

# Fewer sentences than these have no score of their own.
FEWEST = 20
# Buckets end at so many L.
ENDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
Score = Literal["perplexity", "exact", "bleu"]


class Line(NamedTuple):
    """A sentence of a set, and what one run made of it."""

    source_pieces: int
    target_pieces: int
    nll: float
    hypothesis: str
    reference: str

    @property
    def length(self) -> int:
        """In pieces with its end: of source or target, whichever is longer."""
        return max(self.source_pieces, self.target_pieces)


@dataclass(frozen=True)
class Bucket:
    """The sentences of more than `above` pieces and at most `end`, by their places."""

    above: float
    end: float
    places: np.ndarray

    @property
    def name(self) -> str:
        """As an interval."""
        return f"({self.above:g}, {self.end:g}]"


@dataclass(frozen=True)
class Study:
    """Scores by row and bucket, over seeds."""

    sweep: Sweep
    limit: int
    """L."""
    buckets: Sequence[Bucket]
    metric: Score
    """Beside perplexity: exact of number words, bleu of text."""
    signature: str
    """Of BLEU."""
    scores: Mapping[str, Sequence[Mapping[Score, SeedStatistics]]]
    """By row, for each bucket; none of a row of which no run is done."""
    missing: Sequence[str]
    """What has no score, and why."""


def study(sweep: Sweep) -> Study:
    """Read what the runs of a sweep made of sentences of every length.

    Raises:
        UsageError: no run is done, or two were scored on other sentences.
        StorageError: what a run kept cannot be read.
    """
    base = next(iter(sweep.rows.values())).config
    missing: list[str] = []
    by_row: dict[str, list[list[Line]]] = {name: [] for name in sweep.rows}
    for run in sweep.runs:
        state = read_status(run)
        if state.status == "done":
            sets = [name for name in state.finished if name != "train"]
            by_row[run.row].append([line for name in sets for line in _lines(run, name)])
        else:
            missing.append(f"{run.name}: {state.summary}")
    done = [found for rows in by_row.values() for found in rows]
    if not done:
        raise UsageError(f"no run of {sweep.path} is done: there is nothing to compare")
    wanted = _asked(done[0])
    if any(_asked(found) != wanted for found in done):
        raise UsageError(f"runs of {sweep.path} were scored on other sentences than one another")
    lengths = np.array([line.length for line in done[0]])
    limit = base.data.max_length
    found, why = buckets(lengths, limit)
    metric: Score = "exact" if base.data.corpus == "number_words" else "bleu"
    tokenizer = bleu_tokenizer(base.data)
    scores = {
        name: [
            _spreads([_scores([run[i] for i in bucket.places], metric, tokenizer) for run in runs])
            for bucket in found
        ]
        for name, runs in by_row.items()
        if runs
    }
    some = [line.reference for line in done[0][:1]]
    signature = score(some, some, tokenizer=tokenizer).bleu_signature
    return Study(sweep, limit, found, metric, signature, scores, [*missing, *why])


def buckets(lengths: np.ndarray, limit: int) -> tuple[list[Bucket], list[str]]:
    """Part sentences by length, in steps of half of L up to 4 L, and at L.

    A part with fewer sentences than `FEWEST` is joined with the next longer one, or, where there
    is none on its side of L, with the one before.

    Args:
        lengths: in pieces, int[sentences].
        limit: L.

    Returns:
        The buckets, shortest first; and, in words, the sentences that are in none.
    """
    found: list[Bucket] = []
    why: list[str] = []
    for side in ([e for e in ENDS if e <= 1], [e for e in ENDS if e > 1]):
        first = above = limit if side[0] > 1 else 0
        parts: list[Bucket] = []
        for end in side:
            places = _between(lengths, above, limit * end)
            if len(places) >= FEWEST:
                parts.append(Bucket(above, limit * end, places))
                above = limit * end
        last = limit * side[-1]
        if above < last and parts:
            start = parts.pop().above
            parts.append(Bucket(start, last, _between(lengths, start, last)))
        elif above < last:
            count = len(_between(lengths, first, last))
            why.append(f"({first:g}, {last:g}]: {count} sentences, fewer than {FEWEST}")
        found += parts
    if beyond := int(np.sum(lengths > limit * ENDS[-1])):
        why.append(f"longer than {limit * ENDS[-1]:g}: {beyond} sentences, left out")
    return found, why


def _between(lengths: np.ndarray, above: float, end: float) -> np.ndarray:
    return np.flatnonzero((lengths > above) & (lengths <= end))


def _asked(found: Sequence[Line]) -> list[tuple[int, int, str]]:
    return [(line.source_pieces, line.target_pieces, line.reference) for line in found]


def _scores(found: Sequence[Line], metric: Score, tokenizer: str) -> dict[Score, float]:
    """Return the scores of some sentences: BLEU and exact matches in percent."""
    nll = math.fsum(line.nll for line in found) / sum(line.target_pieces for line in found)
    scores: dict[Score, float] = {"perplexity": math.exp(min(nll, 700.0))}
    if metric == "exact":
        scores["exact"] = 100 * float(np.mean([x.hypothesis == x.reference for x in found]))
    else:
        bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
        references = [[line.reference for line in found]]
        scores["bleu"] = bleu.corpus_score([line.hypothesis for line in found], references).score
    return scores


def _spreads(found: Sequence[Mapping[Score, float]]) -> dict[Score, SeedStatistics]:
    return {name: SeedStatistics(tuple(scores[name] for scores in found)) for name in found[0]}


def _lines(run: SweepRun, name: str) -> Iterator[Line]:
    """Yield what a run made of a set, by its newest evaluation.

    Raises:
        StorageError: there is none, or none with sentences.csv, or a file is not as we write it.
    """
    again = f"run `{shell_command('evaluate', run.path, '--split', name)}`"
    folders = [path.parent for path in run.path.glob(f"evaluations/{name}-*/scores.json")]
    if not folders:
        raise StorageError(f"{run.path} has no scores of its {name} set: {again}")
    newest = max(folders, key=lambda folder: (folder / "scores.json").stat().st_mtime)
    try:
        with (newest / "sentences.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        texts = (_read(newest / f"{kind}.txt") for kind in ("hypothesis", "reference"))
        for row, hypothesis, reference in zip(rows, *texts, strict=True):
            numbers = int(row["source_pieces"]), int(row["target_pieces"]), float(row["nll"])
            yield Line(*numbers, hypothesis, reference)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{newest} cannot be read: {error}; {again}") from error


def _read(path: Path) -> list[str]:
    return path.read_text("utf-8").split("\n")[:-1]
