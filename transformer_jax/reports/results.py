"""Collect the results of a sweep: scores by row and seed, and comparisons with the first row.

docs/statistics.md describes the statistical analysis.
"""

import contextlib
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from transformer_jax.baselines.build import count_parameters
from transformer_jax.config import Config, Paper, Row
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import ConfigError, TransformerJaxError, UsageError
from transformer_jax.files import JsonObject, read_json_object
from transformer_jax.reports.seed_statistics import (
    BLEU_MARGIN,
    LOG_PERPLEXITY_MARGIN,
    Analysis,
    Comparison,
    SignAgreement,
    Verdict,
    analyze,
    failed_seeds,
    sign_agreement,
    verdict,
)
from transformer_jax.reports.translations import (
    BleuDifference,
    compare_test_bleu,
    read_translations,
)
from transformer_jax.runs.metrics_file import is_number, read_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import RunStatus

# A score that a report compares with the paper's score. `Paper` has a field with the same name.
PaperScore = Literal["perplexity", "bleu"]
MARGINS: dict[PaperScore, float] = {"perplexity": LOG_PERPLEXITY_MARGIN, "bleu": BLEU_MARGIN}


@dataclass(frozen=True)
class RowResult:
    """The results of one row."""

    name: str
    change: str
    """The config fields that differ from those of the first row, with their values."""
    config: Config
    """The config that the runs were trained with. The vocabulary may be smaller than requested."""
    paper: Paper
    parameters: int
    flops: tuple[float, float] | None
    """The mean FLOPs of a training run: the counted FLOPs, and an estimate by the paper's method
    (training time multiplied by the devices' peak FLOP/s). None if no finished run has recorded its
    FLOPs."""
    statuses: Sequence[RunStatus]
    scores: Mapping[str, Mapping[int, float]]
    """The scores, keyed by name and seed. `perplexity` and `bleu` are computed on the development
    set. `test_bleu`, `compound_bleu`, and `test_task` (the main score of the task) are computed on
    the test set. Runs that failed to train are excluded."""
    unigram: float | None
    """The best unigram model's perplexity on the development set, if known."""
    failed: Mapping[int, float]
    """The perplexities of runs that failed to train, keyed by seed. Training counts as failed if
    the perplexity is not finite or exceeds that of a unigram model."""
    has_own_text: bool
    """Whether the row's text or vocabulary differs from the first row's. If so, the two rows'
    perplexities per token are not comparable."""

    @property
    def trained(self) -> list[RunStatus]:
        """The statuses of all runs except those that failed to train."""
        return [status for status in self.statuses if status.run.seed not in self.failed]

    @property
    def missing(self) -> dict[str, str]:
        """The reasons why some runs have no scores, keyed by run name."""
        return {
            s.run.name: _explain_missing(s)
            for s in self.statuses
            if s.status != "done" or "dev" not in s.scores
        }


@dataclass(frozen=True)
class Results:
    """The results of a sweep. All other rows are compared with the first row."""

    sweep: Sweep
    rows: Mapping[str, RowResult]
    test_differences: Mapping[str, Mapping[int, BleuDifference]]
    """The difference in test BLEU from the first row, keyed by row and seed."""
    signature: str
    """The sacreBLEU signature of the test BLEU comparisons, or "" if there are none."""
    command: str
    """The command that writes this report."""

    @property
    def base(self) -> RowResult:
        """The first row."""
        return next(iter(self.rows.values()))

    @property
    def statuses(self) -> list[RunStatus]:
        """The statuses of all runs."""
        return [status for row in self.rows.values() for status in row.statuses]

    @functools.cached_property
    def analyses(self) -> Mapping[PaperScore, Analysis]:
        """Comparisons of each row with the first row, in log perplexity and in dev BLEU."""
        logarithms = {
            name: {seed: math.log(x) for seed, x in row.scores.get("perplexity", {}).items()}
            for name, row in self.rows.items()
            if not row.has_own_text
        }
        bleu = {name: row.scores.get("bleu", {}) for name, row in self.rows.items()}
        return {"perplexity": analyze(logarithms), "bleu": analyze(bleu)}

    def compare(self, name: str, score: PaperScore) -> Comparison:
        """Compare a row's log perplexity or BLEU score with that of the first row."""
        difference = 0.0 if name == self.base.name else None
        nothing = Comparison(difference, None, None)
        return self.analyses[score].comparisons.get(name, nothing)

    def paper_difference(self, name: str, score: PaperScore) -> float | None:
        """Return how much a row's score differs from the first row's score in the paper.

        For perplexity, the difference is between logarithms. Return None if the paper does not
        report both scores.
        """
        ours, base = getattr(self.rows[name].paper, score), getattr(self.base.paper, score)
        if ours is None or base is None:
            return None
        return math.log(ours / base) if score == "perplexity" else ours - base

    def verdict(self, name: str, score: PaperScore) -> Verdict | None:
        """Return whether a row's difference from the first row agrees with the paper.

        Return None for the first row, or if a score is missing.
        """
        paper, comparison = self.paper_difference(name, score), self.compare(name, score)
        if paper is None or comparison.difference is None or name == self.base.name:
            return None
        return verdict(comparison.interval, paper, MARGINS[score])

    def sign_agreement(self, score: PaperScore) -> SignAgreement:
        """Count the rows whose difference from the first row has the same sign as in the paper."""
        compared = [
            (ours, paper)
            for name in self.rows
            if (ours := self.compare(name, score).difference) is not None
            and (paper := self.paper_difference(name, score)) is not None
        ]
        return sign_agreement(compared, MARGINS[score])


def collect_results(sweep: Sweep, statuses: Sequence[RunStatus], command: str) -> Results:
    """Collect the results of all runs so far; raise UsageError if no run has finished."""
    if not any(status.status == "done" for status in statuses):
        raise UsageError(f"no run of {sweep.path} has finished, so there is nothing to report")
    base_name, base = next(iter(sweep.rows.items()))
    by_row = {name: [s for s in statuses if s.run.row == name] for name in sweep.rows}
    base_texts = _fingerprints(by_row[base_name])
    rows = {
        name: _collect_row(name, row, base, by_row[name], base_texts)
        for name, row in sweep.rows.items()
    }
    done = {name: [s for s in row.trained if s.status == "done"] for name, row in rows.items()}
    differences, signature = compare_test_bleu(bleu_tokenizer(base.config.data), done)
    return Results(sweep, rows, differences, signature, command)


def _collect_row(
    name: str, row: Row, base: Row, statuses: Sequence[RunStatus], base_texts: set[str]
) -> RowResult:
    config = config_as_trained(statuses)
    changes = base.config.differences(row.config)
    changes.pop(("train", "seed"), None)
    done = [status for status in statuses if status.status == "done"]
    perplexities = _collect_scores(done).get("perplexity", {})
    unigram = _unigram_perplexity(done)
    failed = {seed: perplexities[seed] for seed in failed_seeds(perplexities, unigram)}
    return RowResult(
        name,
        ", ".join(f"{key} {value}" for (_, key), (_, value) in changes.items()),
        config,
        row.paper,
        count_parameters(config)["total"],
        _mean_flops(done),
        statuses,
        _collect_scores([status for status in done if status.run.seed not in failed]),
        unigram,
        failed,
        has_own_text=not _fingerprints(statuses) <= base_texts,
    )


def _explain_missing(status: RunStatus) -> str:
    """Return the reason why a run has no scores."""
    if status.status == "done":
        return "has no scores"
    # A sweep that was extended can have more seeds for some rows than for others.
    is_planned = status.status != "queued" or status.run.config_file.exists()
    return status.summary if is_planned else "not planned"


def _unigram_perplexity(statuses: Sequence[RunStatus]) -> float | None:
    """Return the best unigram model's perplexity on the development references."""
    for status in statuses:
        # A run from another version of this package may be in a different format.
        with contextlib.suppress(TransformerJaxError, KeyError, OSError):
            _, references = read_translations(status.evaluations["dev"])
            tokenizer = RunFolder.open(status.run.path).vocabulary.target
            counts = Counter(itertools.chain.from_iterable(tokenizer.encode(references)))
            return math.exp(stats.entropy(list(counts.values())))
    return None


def config_as_trained(statuses: Sequence[RunStatus]) -> Config:
    """Return the config of the first run that has started, or else the planned config.

    A run's config can differ from the planned config, because a learned vocabulary may be smaller
    than requested.
    """
    for status in statuses:
        with contextlib.suppress(KeyError, TypeError, ConfigError):
            return Config.from_dict(read_json_object(status.run.path / "run.json")["config"])
    return statuses[0].run.config


def _fingerprints(statuses: Sequence[RunStatus]) -> set[str]:
    """Return the fingerprints of the text and vocabularies that the runs were trained with."""
    fingerprints = set()
    for status in statuses:
        with contextlib.suppress(KeyError, TypeError):
            data = read_json_object(status.run.path / "run.json")["data"]
            fingerprints.add(str(data["fingerprint"]))
    return fingerprints


def _collect_scores(statuses: Sequence[RunStatus]) -> dict[str, dict[int, float]]:
    """Return the scores, keyed by name and seed. Values of unexpected types are ignored."""
    scores: dict[str, dict[int, float]] = {}
    for status in statuses:
        dev, test = status.scores.get("dev", {}), status.scores.get("test", {})
        values: dict[str, object] = {
            "perplexity": dev.get("perplexity"),
            "bleu": dev.get("bleu"),
            "test_bleu": test.get("bleu"),
            # Compound splitting requires words, so character-level BLEU has no compound score.
            "compound_bleu": test.get("compound_bleu"),
            "test_task": _main_score(test.get("task")),
        }
        for name, value in values.items():
            if is_number(value):
                scores.setdefault(name, {})[status.run.seed] = float(value)
    return scores


def _main_score(task: object) -> object:
    """Return the main score from a task's stored result, or None if it is missing."""
    if not isinstance(task, dict) or not isinstance(name := task.get("main_score"), str):
        return None
    return task.get(name)


def _mean_flops(statuses: Sequence[RunStatus]) -> tuple[float, float] | None:
    """Return the mean FLOPs of training runs, both counted and estimated by the paper's method."""
    all_reports = [read_metrics(status.run.path / "metrics.jsonl") for status in statuses]
    runs = [xs for reports in all_reports if (xs := list(filter(_has_flops, reports)))]
    if not runs:
        return None
    counted = statistics.fmean(sum(x["flops"] for x in xs) for xs in runs)
    # Utilization is the ratio of counted FLOPs to peak FLOPs.
    return counted, statistics.fmean(sum(x["flops"] / x["utilization"] for x in xs) for xs in runs)


def _has_flops(report: JsonObject) -> bool:
    """Return whether a report's FLOPs and utilization are positive numbers."""
    return all(is_number(x) and x > 0 for x in (report.get("flops"), report.get("utilization")))
