"""The results of a sweep: scores by row and seed, and comparisons with the first row.

docs/statistics.md describes the statistical analysis.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformer_jax.config import Config, Paper
from transformer_jax.errors import ConfigError
from transformer_jax.files import read_json_if_valid
from transformer_jax.reports.factors import Contrast, analyze_factors, find_factors
from transformer_jax.reports.seed_statistics import (
    BLEU_MARGIN,
    LOG_PERPLEXITY_MARGIN,
    Analysis,
    RowComparison,
    Verdict,
    analyze,
    deviation_interval,
    seeds_for_equivalence,
    verdict,
)
from transformer_jax.sweeps.plan import Sweep, find_copied
from transformer_jax.sweeps.status import RunStatus

# A score that a report compares with the paper's score. Each name is also a field of `Paper`.
PaperScore = Literal["perplexity", "bleu"]
# The sets on which a report compares rows. The paper's scores are from its development set.
ScoredSplit = Literal["dev", "test"]
SPLITS: tuple[ScoredSplit, ...] = ("dev", "test")
MARGINS: dict[PaperScore, float] = {"perplexity": LOG_PERPLEXITY_MARGIN, "bleu": BLEU_MARGIN}


class BleuDifference(NamedTuple):
    """The difference in test BLEU between a run and the first row's run with the same seed."""

    bleu: float
    p: float | None
    """The p-value of approximate randomization over sentences. It is None in an archived report."""


@dataclass(frozen=True)
class RowResult:
    """The results of one row."""

    name: str
    change: str
    """The config fields that differ from those of the first row, with their values. Fields that the
    row's architecture does not use are omitted."""
    config: Config
    """The config that the runs were trained with. The vocabulary may be smaller than requested."""
    paper: Paper
    parameters: int
    flops: tuple[float, float] | None
    """The mean FLOPs of a run, if known: counted, and time x peak FLOP/s as in the paper."""
    statuses: Sequence[RunStatus]
    scores: Mapping[str, Mapping[int, float]]
    """The scores, keyed by name and seed, except those of `failed` runs. `perplexity` and `bleu`
    are computed on the development set, and all others on the test set: `precision` is BLEU without
    its brevity penalty, and `test_task` is the main score of the task."""
    unigram: float | None
    """The best unigram model's perplexity on the development set, if known."""
    failed: Mapping[int, float]
    """The perplexities, by seed, that are not finite or exceed a unigram model's."""
    is_control: bool
    """Whether this row is a copy of another row with other seeds."""
    has_other_text: bool
    """Whether the row's vocabulary, development set, or test set differs from the first row's, so
    that their perplexities per token are not comparable."""
    step_seconds: float | None = None
    """The duration of a training step in the fastest run, if known."""

    def find(self, score: PaperScore, split: ScoredSplit) -> Collection[tuple[int, float]]:
        """Return the score of each seed on a set."""
        return self.scores.get(score if split == "dev" else f"test_{score}", {}).items()

    @property
    def trained(self) -> list[RunStatus]:
        """The statuses of all runs except those that failed to train."""
        return [status for status in self.statuses if status.run.seed not in self.failed]

    @property
    def missing(self) -> dict[str, str]:
        """The reasons why some runs have no scores, keyed by run name."""
        return {
            s.run.name: s.why_missing for s in self.statuses if s.status != "done" or not s.scores
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
    trials: Sequence[RunStatus] = ()
    split: ScoredSplit | None = None
    """The only set to analyze, or None for all sets that have scores."""

    @property
    def base(self) -> RowResult:
        """The first row."""
        return next(iter(self.rows.values()))

    @property
    def compared(self) -> list[str]:
        """The names of the rows that the report judges: all except the first row and controls."""
        return [name for name, row in list(self.rows.items())[1:] if not row.is_control]

    @property
    def statuses(self) -> list[RunStatus]:
        """The statuses of all runs."""
        return [status for row in self.rows.values() for status in row.statuses]

    @property
    def splits(self) -> tuple[ScoredSplit, ...]:
        """The sets to analyze. The answers use the last one.

        These are the sets on which the first row and another row were scored. If there is no such
        set, they are the sets on which any row was scored.
        """
        if self.split is not None:
            return (self.split,)
        rows = [self.rows[name] for name in self.compared]
        scored: list[ScoredSplit] = [x for x in SPLITS if _any_scored(self.rows.values(), x)]
        comparable = [
            split
            for split in scored
            if _any_scored([self.base], split) and (not rows or _any_scored(rows, split))
        ]
        return tuple(comparable or scored or SPLITS[:1])

    @functools.cached_property
    def analyses(self) -> Mapping[ScoredSplit, Mapping[PaperScore, Analysis]]:
        """The comparisons of each row with the first row, keyed by set and score."""

        def analyze_score(score: PaperScore, split: ScoredSplit) -> Analysis:
            names = [self.base.name, *self.compared]
            if score == "perplexity":
                names = [name for name in names if not self.rows[name].has_other_text]
            return analyze({name: self._find_scores(name, score, split) for name in names})

        return {
            split: {score: analyze_score(score, split) for score in MARGINS}
            for split in self.splits
        }

    def _find_scores(self, name: str, score: PaperScore, split: ScoredSplit) -> dict[int, float]:
        found = self.rows[name].find(score, split)
        return {seed: math.log(x) if score == "perplexity" else x for seed, x in found}

    def contrasts(self, score: PaperScore, split: ScoredSplit) -> list[Contrast]:
        """Return the effects of each field, if the rows are all combinations of several fields."""
        names = (self.base.name, *self.compared)
        configs = {name: self.sweep.rows[name].config for name in names}
        if (factors := find_factors(configs)) is None:
            return []
        if score == "perplexity" and any(self.rows[name].has_other_text for name in names):
            return []
        scores = {name: self._find_scores(name, score, split) for name in names}
        return analyze_factors(scores, configs, factors)

    def compare(
        self, name: str, score: PaperScore, split: ScoredSplit | None = None
    ) -> RowComparison:
        """Compare a row's log perplexity or BLEU with that of the first row.

        A control's seeds differ from the first row's, so its interval is Welch's. `split` defaults
        to the first set, which is the development set if it is analyzed.
        """
        split = split or self.splits[0]
        if self.rows[name].is_control:
            return self._compare_pair(name, self.base.name, score, split)
        difference = 0.0 if name == self.base.name else None
        nothing = RowComparison(difference, None, None)
        analyses = self.analyses.get(split)
        return analyses[score].comparisons.get(name, nothing) if analyses else nothing

    def compare_control(self, name: str, score: PaperScore, split: ScoredSplit) -> RowComparison:
        """Compare a control with the row that it copies."""
        return self._compare_pair(name, find_copied(self.sweep.rows, name), score, split)

    def _compare_pair(
        self, name: str, base: str, score: PaperScore, split: ScoredSplit
    ) -> RowComparison:
        has_other_text = self.rows[name].has_other_text != self.rows[base].has_other_text
        if score == "perplexity" and has_other_text:
            return RowComparison(None, None, None)
        scores = {x: self._find_scores(x, score, split) for x in (base, name)}
        return analyze(scores).comparisons[name]

    def paper_difference(self, name: str, score: PaperScore) -> float | None:
        """Return a row's difference from the first row in the paper, in ln perplexity or BLEU."""
        ours, base = getattr(self.rows[name].paper, score), getattr(self.base.paper, score)
        if ours is None or base is None:
            return None
        if score == "perplexity":
            return math.log(ours / base)
        # The paper states one decimal digit, but 24.9 - 25.1 is slightly less than -0.2.
        return round(ours - base, 6)

    def verdict(
        self,
        name: str,
        score: PaperScore,
        split: ScoredSplit | None = None,
        method: Literal["interval", "welch"] = "interval",
    ) -> Verdict | None:
        """Return whether a row's difference from the first row agrees with the paper, if known.

        `method` selects the simultaneous interval or Welch's. The result is None if Welch's
        interval is missing.
        """
        paper, comparison = self.paper_difference(name, score), self.compare(name, score, split)
        if paper is None or comparison.difference is None or name == self.base.name:
            return None
        if method == "welch" and comparison.welch is None:
            return None
        return verdict(getattr(comparison, method), paper, MARGINS[score])

    def differences(
        self, score: PaperScore, split: ScoredSplit | None = None
    ) -> list[tuple[float, float]]:
        """Return each row's difference from the first row in our results and in the paper's."""
        return [
            (ours, paper)
            for name in self.compared
            if (ours := self.compare(name, score, split).difference) is not None
            and (paper := self.paper_difference(name, score)) is not None
        ]

    def seeds_for_equivalence(
        self, score: PaperScore, split: ScoredSplit
    ) -> tuple[int, int, int] | None:
        """Return how many seeds are necessary to show equivalence, or None if unknown.

        The other two numbers are the ends of the 95% interval of this estimate.
        """
        analysis = self.analyses[split][score]
        if not analysis.deviation:
            return None
        interval = deviation_interval(analysis.deviation, analysis.freedom)
        seeds, low, high = (
            seeds_for_equivalence(deviation, len(analysis.comparisons), MARGINS[score])
            for deviation in (analysis.deviation, *interval)
        )
        return seeds, low, high


def _any_scored(rows: Iterable[RowResult], split: ScoredSplit) -> bool:
    return any(row.find(score, split) for row in rows for score in MARGINS)


def config_as_trained(statuses: Sequence[RunStatus]) -> Config:
    """Return the config of the first run that has started, or else the planned config."""
    for status in statuses:
        with contextlib.suppress(KeyError, TypeError, ConfigError):
            return Config.from_dict(read_json_if_valid(status.run.path / "run.json")["config"])
    return statuses[0].run.config
