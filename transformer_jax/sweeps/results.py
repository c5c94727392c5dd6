"""What a sweep found: of each row the scores of its runs, their spread, and what they prove."""

import contextlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sacrebleu
from scipy import stats

from transformer_jax.config import Config, Paper
from transformer_jax.console import shell_command
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.splits import Split
from transformer_jax.errors import ConfigError, UsageError
from transformer_jax.inference.evaluate import sacrebleu_metrics
from transformer_jax.inference.significance import bootstrap, p_value
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.sweeps.adhoc import Gathered
from transformer_jax.sweeps.plan import PlannedRun, Sweep
from transformer_jax.sweeps.status import RunStatus, newest_evaluation, read_reports, read_status

CONFIDENCE = 0.95
# As tensor2tensor's get_ende_bleu.sh parts compounds, for the paper's figures.
COMPOUND = re.compile(r"(\S)-(\S)")


@dataclass(frozen=True)
class SeedStatistics:
    """A score over random seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class RowResult:
    """What is known of a row; where a score is missing, `missing` says why."""

    name: str
    change: str
    """What is different from the first row."""
    paper: Paper
    parameters: int
    flops: tuple[float, float] | None
    """Of one training: counted, and by the paper's method, which is time x what the devices could
    do in that time."""
    states: Sequence[RunStatus]
    missing: Sequence[str] = ()
    scores: Mapping[str, SeedStatistics] = field(default_factory=dict)
    """By name: perplexity and bleu on the development set; test_bleu, compound_bleu on the test
    set."""
    p: Mapping[int, float] = field(default_factory=dict)
    """By seed: how often a difference from the first row like this one, in BLEU on the test set,
    comes by the choice of sentences alone."""
    has_own_text: bool = False
    """Whether its text or vocabulary is another than the first row's: perplexities per piece
    cannot be compared."""


@dataclass(frozen=True)
class Results:
    """A sweep's results, row by row."""

    sweep: Sweep
    rows: Mapping[str, RowResult]
    signature: str
    """Of BLEU on the test set."""

    @property
    def command(self) -> str:
        """What makes this report."""
        if not isinstance(self.sweep, Gathered):
            return shell_command("report", self.sweep.path)
        return shell_command(
            "report", *(run.path for run in self.sweep.runs), "--out", self.sweep.path
        )

    @property
    def base(self) -> RowResult:
        """The row that others are compared with."""
        return next(iter(self.rows.values()))

    def difference(self, name: str, score: str) -> float | None:
        """Return how far a row's mean is above the first row's.

        None where one is missing, or they cannot be compared.
        """
        ours, base = self.rows[name].scores.get(score), self.base.scores.get(score)
        if score == "perplexity" and self.rows[name].has_own_text:
            return None
        return None if ours is None or base is None else ours.mean - base.mean

    def minimum_detectable_difference(self, score: str) -> float | None:
        """Return the smallest difference that seeds alone do not explain, of two whole rows.

        None where no row has two runs.
        """
        counts = [len(x.scores[score].values) for x in self.rows.values() if score in x.scores]
        return self._explained(score, max(counts), max(counts)) if counts else None

    def _explained(self, score: str, ours: int, theirs: int) -> float | None:
        """Return how far apart seeds alone bring the means of so many runs.

        Means of m and of n runs differ by more than t sqrt(1 / m + 1 / n) s in 5 % of cases where
        there is no difference; s is the standard deviation over seeds, pooled over all rows.
        """
        found = [row.scores[score].values for row in self.rows.values() if score in row.scores]
        several = [values for values in found if len(values) > 1]
        freedom = sum(len(values) - 1 for values in several)
        if not freedom:
            return None
        squares = sum(statistics.variance(values) * (len(values) - 1) for values in several)
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
        return quantile * math.sqrt(1 / ours + 1 / theirs) * math.sqrt(squares / freedom)

    def agrees(self, name: str, score: str) -> bool | None:
        """Tell whether a row is better or worse than the first as in the paper.

        None where the paper sees no difference, or has none of these figures, or we have not.
        """
        theirs = _paper_difference(self.rows[name].paper, self.base.paper, score)
        ours = self.difference(name, score)
        return None if not theirs or ours is None else (ours > 0) == (theirs > 0)

    def is_significant(self, name: str, score: str) -> bool:
        """Tell whether a row differs from the first by more than seeds explain."""
        difference = self.difference(name, score)
        if difference is None:
            return False
        counts = (len(row.scores[score].values) for row in (self.rows[name], self.base))
        least = self._explained(score, *counts)
        return least is not None and abs(difference) > least


def _paper_difference(paper: Paper, base: Paper, score: str) -> float | None:
    ours, theirs = getattr(paper, score), getattr(base, score)
    return None if ours is None or theirs is None else ours - theirs


def collect_results(sweep: Sweep) -> Results:
    """Read what the runs of a sweep have found so far.

    Raises:
        UsageError: not one of them is done.
    """
    by_row = {name: list[RunStatus]() for name in sweep.rows}
    for run in sweep.runs:
        by_row[run.row].append(read_status(run))
    if not any(state.status == "done" for states in by_row.values() for state in states):
        raise UsageError(f"no run of {sweep.path} is done: there is nothing to report")
    p, signature = _significance(sweep, by_row)
    first, base = next((name, row.config) for name, row in sweep.rows.items())
    rows = {}
    for name, row in sweep.rows.items():
        states = by_row[name]
        config = _as_trained(states)
        sizes = config.data.vocab_size, config.data.source_vocab_size
        changes = base.differences(row.config)
        changes.pop(("train", "seed"), None)
        rows[name] = RowResult(
            name,
            ", ".join(f"{key} {after}" for (_, key), (_, after) in changes.items()),
            row.paper,
            parameter_counts(build_transformer(config.model, *sizes))["total"],
            _spent([state for state in states if state.status == "done"]),
            states,
            [
                f"{s.run.name}: {'has no scores' if s.status == 'done' else s.summary}"
                for s in states
                if s.status != "done" or "dev" not in s.scores
            ],
            _spreads([state for state in states if state.status == "done"]),
            p.get(name, {}),
            has_own_text=not _texts(states) <= _texts(by_row[first]),
        )
    return Results(sweep, rows, signature)


def _as_trained(states: Sequence[RunStatus]) -> Config:
    """Return a row's config; of one that has begun its own, where the vocabulary may be smaller."""
    for state in states:
        with contextlib.suppress(KeyError, TypeError, ConfigError):
            return Config.from_dict(_description(state.run)["config"])
    return states[0].run.config


def _texts(states: Sequence[RunStatus]) -> set[str]:
    """Return the fingerprints of what runs were trained on."""
    return {
        str(data["fingerprint"])
        for state in states
        if isinstance(data := _description(state.run).get("data"), dict) and "fingerprint" in data
    }


def _description(run: PlannedRun) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run.path / "run.json").read_text("utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _spreads(states: Sequence[RunStatus]) -> dict[str, SeedStatistics]:
    found: dict[str, list[float]] = {}
    for state in states:
        for split, names in (
            ("dev", {"perplexity": "perplexity", "bleu": "bleu"}),
            ("test", {"bleu": "test_bleu"}),
        ):
            for key, name in names.items():
                if split in state.scores:
                    found.setdefault(name, []).append(float(state.scores[split][key]))
        tokenizer, lines = bleu_tokenizer(state.run.config.data), _lines(state.run, "test")
        # Where BLEU is over characters, words have no part in it.
        if lines is not None and tokenizer != "char":
            found.setdefault("compound_bleu", []).append(compound_bleu(tokenizer, *lines))
    return {name: SeedStatistics(tuple(values)) for name, values in found.items()}


def _spent(states: Sequence[RunStatus]) -> tuple[float, float] | None:
    """Return FLOPs of training, counted and by the paper's method: mean over runs."""
    totals = []
    for state in states:
        reports = read_reports(state.run.path / "metrics.jsonl")
        spans = [(x["flops"], x["utilization"]) for x in reports if x.get("flops")]
        if spans:
            # Utilisation is what was counted over what could have been done.
            totals.append((sum(f for f, _ in spans), sum(f / used for f, used in spans)))
    if not totals:
        return None
    counted, possible = (statistics.fmean(column) for column in zip(*totals, strict=True))
    return counted, possible


def compound_bleu(tokenizer: str, hypotheses: list[str], references: list[str]) -> float:
    """Return BLEU as the paper has it: over tokens, with compounds parted at their hyphens."""
    if tokenizer != "none":
        bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
        hypotheses, references = (
            [bleu.tokenizer(line) for line in lines] for lines in (hypotheses, references)
        )
    parted = [
        [COMPOUND.sub(r"\1 ##AT##-##AT## \2", line) for line in lines]
        for lines in (hypotheses, references)
    ]
    return sacrebleu.BLEU(tokenize="none", force=True).corpus_score(parted[0], [parted[1]]).score


def _significance(
    sweep: Sweep, by_row: Mapping[str, Sequence[RunStatus]]
) -> tuple[dict[str, dict[int, float]], str]:
    """Compare every row with the first, from the same seed, on the test set."""
    base = next(iter(by_row))
    tokenizer = bleu_tokenizer(sweep.rows[base].config.data)
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    found: dict[str, dict[int, float]] = {}
    signature = ""
    for seed in sweep.seeds:
        lines = {
            name: _lines(state.run, "test")
            for name, states in by_row.items()
            for state in states
            if state.status == "done" and state.run.seed == seed
        }
        first = lines.get(base)
        if first is None:
            continue
        systems = [(name, pair[0]) for name, pair in lines.items() if pair and pair[1] == first[1]]
        if len(systems) < 2:
            continue
        signatures, compared = bootstrap(systems, {"BLEU": bleu}, first[1])
        signature = str(signatures["BLEU"])
        baseline, *others = compared["BLEU"]
        for (name, _), ours in zip(systems[1:], others, strict=True):
            found.setdefault(name, {})[seed] = p_value(ours, baseline)
    return found, signature


def _lines(run: PlannedRun, split: Split) -> tuple[list[str], list[str]] | None:
    """Return the newest translations of a set, and their references."""
    newest = newest_evaluation(run, split)
    if newest is None:
        return None
    return _read(newest / "hypothesis.txt"), _read(newest / "reference.txt")


def _read(path: Path) -> list[str]:
    return path.read_text("utf-8").split("\n")[:-1]
