"""Score a sweep's runs by sentence length, both within and beyond the training lengths.

This module computes the scores from the files that `evaluate` saved. `read_scores` reads the scores
from an earlier report's `table.csv` instead. L is the maximum length of a training sentence in
tokens, including EOS (data.max_length). Each row in the sweep represents a position scheme or, if
the buckets end at given edges, any model.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.provenance import select_trained
from experiments.sentences import Sentence, read_sentences
from transformer_jax.config.rows import CONTROL
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.evaluation.scores import choose_tokenizer, sacrebleu_metrics, score
from transformer_jax.reports.footnotes import describe_missing
from transformer_jax.sweeps.plan import Sweep, find_copied
from transformer_jax.sweeps.status import read_status

# The minimum number of sentences in a bucket.
MIN_SENTENCES = 20
# By default, the upper bounds of the buckets, in multiples of L.
ENDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
Score = Literal["perplexity", "exact", "bleu"]


@dataclass(frozen=True)
class Bucket:
    """The sentences with more than `above` but at most `end` tokens."""

    above: float
    end: float
    indices: np.ndarray
    """The indices of the bucket's sentences, int[sentences]."""

    @property
    def name(self) -> str:
        """The bucket's range of lengths, in interval notation."""
        return f"({self.above:g}, {self.end:g}]"


Curve = Sequence[Mapping[Score, Sequence[float]]]
"""A position scheme's scores in each length bucket, with one value per seed."""


@dataclass(frozen=True)
class Study:
    """The scores of all position schemes by sentence length."""

    schemes: Sequence[str]
    """The names of the sweep's rows. The study compares all other rows with the first row."""
    seeds: Mapping[str, Sequence[int]]
    """The seeds of each scheme's finished runs, in the same order as the scores."""
    max_training_length: int
    """L, the maximum length of a training sentence in tokens, including EOS."""
    buckets: Sequence[Bucket]
    metric: Score
    """The score that is reported alongside perplexity: "exact" for number words, "bleu" for other
    text."""
    bleu_signature: str
    curves: Mapping[str, Curve]
    """The score curve of each scheme that has a finished run."""
    missing: Sequence[str]
    """Notes on the runs and sentences that were not scored, with the reasons."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """The scheme that each negative control copies."""
    sets: Sequence[str] = ("dev", "test")
    """The sets whose sentences are in the buckets."""

    @property
    def reaches_limit(self) -> bool:
        """Whether the buckets extend at least to L."""
        return self.max_training_length <= self.buckets[-1].end


def score_by_length(sweep: Sweep, edges: Sequence[float] = ()) -> Study:
    """Split the sentences into buckets by length, and score each trained run on each bucket.

    The buckets contain the sentences of the development and test sets. If the sweep is tuned, they
    contain only those of the test set, because the values were chosen on the development set.

    Args:
        sweep: the study's sweep.
        edges: the upper bounds of the buckets, in tokens. Without them, the buckets end at
            multiples of L / 2.

    Raises:
        UsageError: no run has trained, the runs were scored on different sentences, or no bucket
            has enough sentences.
        StorageError: a run's evaluation cannot be read.
    """
    config = next(iter(sweep.rows.values())).config
    runs_by_scheme: dict[str, list[list[Sentence]]] = {name: [] for name in sweep.rows}
    seeds: dict[str, list[int]] = {name: [] for name in sweep.rows}
    sets: set[str] = set()
    statuses = [read_status(run) for run in sweep.runs]
    missing = [(x.run.name, x.why_missing) for x in statuses if x.status != "done"]
    trained, _ = select_trained(statuses)
    for status in trained:
        has_choice = sweep.tuning is not None and "test" in status.finished
        skipped = {"train", "dev"} if has_choice else {"train"}
        splits = [name for name in status.finished if name not in skipped]
        sets |= {*splits}
        sentences = [x for split in splits for x in read_sentences(status.run, split)]
        runs_by_scheme[status.run.row].append(sentences)
        seeds[status.run.row].append(status.run.seed)
    finished = [sentences for runs in runs_by_scheme.values() for sentences in runs]
    if not finished:
        raise UsageError(
            f"no run in {sweep.path} has trained successfully, so there is nothing to compare"
        )
    if any(_references(sentences) != _references(finished[0]) for sentences in finished):
        raise UsageError(f"the runs of {sweep.path} were scored on different sentences")
    lengths = np.array([sentence.length for sentence in finished[0]])
    limit = config.data.max_length
    buckets, excluded = split_by_length(lengths, limit, edges)
    if not buckets:
        raise UsageError(f"no bucket has at least {MIN_SENTENCES} sentences: {'; '.join(excluded)}")
    metric: Score = "exact" if config.data.corpus == "number_words" else "bleu"
    references = [sentence.reference for sentence in finished[0]]
    tokenizer = choose_tokenizer(bleu_tokenizer(config.data), references)
    curves = {
        scheme: [
            _group_by_score(
                [_compute_scores([run[i] for i in b.indices], metric, tokenizer) for run in runs]
            )
            for b in buckets
        ]
        for scheme, runs in runs_by_scheme.items()
        if runs
    }
    reference = [finished[0][0].reference]
    signature = score(reference, reference, tokenizer=tokenizer).bleu_signature
    notes = [*describe_missing(missing), *(f"Missing: {text}" for text in excluded)]
    controls = {
        name: find_copied(sweep.rows, name) for name, row in sweep.rows.items() if row.is_control
    }
    return Study(
        *(list(sweep.rows), seeds, limit, buckets, metric, signature, curves, notes, controls),
        sorted(sets),
    )


def read_scores(path: Path) -> Study:
    """Read a report's `table.csv`, so that its figure can be redrawn without the runs.

    The result contains all scores, but no BLEU signature and no descriptions of missing runs. The
    sentence indices in each bucket are placeholders.

    Raises:
        StorageError: the file cannot be read.
    """
    values: dict[str, dict[tuple[float, float, int], dict[str, dict[int, float]]]] = {}
    limit = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                bounds = float(line["above"]), float(line["end"]), int(line["sentences"])
                by_bucket = values.setdefault(line["row"], {}).setdefault(bounds, {})
                by_seed = by_bucket.setdefault(line["score"], {})
                by_seed[int(line["seed"])] = float(line["value"])
                limit = int(line["max_training_length"])
        bounds = list(next(iter(values.values())))
        metric: Score = "bleu" if "bleu" in values[next(iter(values))][bounds[0]] else "exact"
        names: tuple[Score, ...] = ("perplexity", metric)
        curves = {
            scheme: [{name: list(by_bucket[x][name].values()) for name in names} for x in bounds]
            for scheme, by_bucket in values.items()
        }
        seeds = {scheme: list(by_bucket[bounds[0]][metric]) for scheme, by_bucket in values.items()}
    except (OSError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error!r}") from error
    buckets = [Bucket(above, end, np.arange(count)) for above, end, count in bounds]
    # The table contains only names. `sweep --control` adds a copy of the first row with this name.
    controls = {CONTROL: next(iter(curves))} if CONTROL in list(curves)[1:] else {}
    return Study(list(curves), seeds, limit, buckets, metric, "", curves, [], controls)


def split_by_length(
    lengths: np.ndarray, limit: int, edges: Sequence[float] = ()
) -> tuple[list[Bucket], list[str]]:
    """Split sentences into buckets that end at `edges`, or at multiples of L / 2 up to 4 L.

    If a bucket has fewer than `MIN_SENTENCES` sentences, it is merged with the next bucket. If
    there is no next bucket, it is merged with the previous one. Without `edges`, no bucket extends
    across L.

    Args:
        lengths: int[sentences], in tokens.
        limit: L.
        edges: the upper bounds of the buckets, in tokens.

    Returns: The buckets in order of length, and descriptions of the sentences that are not in any
        bucket.
    """
    ends = sorted(edges) or [limit * end for end in ENDS]
    sides = [(0.0, [end for end in ends if edges or end <= limit])]
    if not edges:
        sides.append((float(limit), [end for end in ends if end > limit]))
    buckets: list[Bucket] = []
    excluded: list[str] = []
    for start, side_ends in sides:
        above = start
        side: list[Bucket] = []
        for end in side_ends:
            indices = _find_between(lengths, above, end)
            if len(indices) >= MIN_SENTENCES:
                side.append(Bucket(above, end, indices))
                above = end
        last = side_ends[-1]
        if above < last and side:
            merged_above = side.pop().above
            side.append(Bucket(merged_above, last, _find_between(lengths, merged_above, last)))
        elif above < last:
            count = len(_find_between(lengths, start, last))
            excluded.append(f"({start:g}, {last:g}]: {count} sentences, fewer than {MIN_SENTENCES}")
        buckets += side
    if longer := int(np.sum(lengths > ends[-1])):
        excluded.append(f"longer than {ends[-1]:g}: {longer} sentences, left out")
    return buckets, excluded


def _find_between(lengths: np.ndarray, above: float, end: float) -> np.ndarray:
    return np.flatnonzero((lengths > above) & (lengths <= end))


def _references(sentences: Sequence[Sentence]) -> list[tuple[int, int, str]]:
    return [(x.source_tokens, x.target_tokens, x.reference) for x in sentences]


def _compute_scores(
    sentences: Sequence[Sentence], metric: Score, tokenizer: str
) -> dict[Score, float]:
    """Return the perplexity, and either the BLEU score or the percentage of exact matches."""
    nll = math.fsum(x.nll for x in sentences) / sum(x.target_tokens for x in sentences)
    scores: dict[Score, float] = {"perplexity": math.exp(min(nll, 700.0))}
    if metric == "exact":
        scores["exact"] = 100 * float(np.mean([x.hypothesis == x.reference for x in sentences]))
    else:
        bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
        hypotheses = [x.hypothesis for x in sentences]
        references = [[x.reference for x in sentences]]
        scores["bleu"] = bleu.corpus_score(hypotheses, references).score
    return scores


def _group_by_score(runs: Sequence[Mapping[Score, float]]) -> dict[Score, list[float]]:
    return {name: [scores[name] for scores in runs] for name in runs[0]}
