"""Collect the results of a sweep: scores by row, their spread over seeds, and significance."""

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import sacrebleu

from transformer_jax.config import Config, Paper, Row
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.splits import Split
from transformer_jax.errors import ConfigError, UsageError
from transformer_jax.inference.evaluate import sacrebleu_metrics
from transformer_jax.inference.significance import bootstrap, p_value
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.seed_statistics import SeedStatistics, detectable_difference
from transformer_jax.sweeps.status import RunStatus, read_json_object, read_metrics

# For the paper's BLEU, tensor2tensor's get_ende_bleu.sh splits compounds that match this pattern.
COMPOUND = re.compile(r"(\S)-(\S)")
# A score of `Paper` that can be compared with ours.
PaperScore = Literal["perplexity", "bleu"]


@dataclass(frozen=True)
class RowResult:
    """The results of one row."""

    name: str
    change: str
    """The fields in which the row differs from the first row, and their values."""
    paper: Paper
    parameters: int
    flops: tuple[float, float] | None
    """The FLOPs of one training run: counted, and by the paper's method (training time multiplied
    by the peak FLOP/s of the devices). None if no run has finished."""
    statuses: Sequence[RunStatus]
    missing: Sequence[str] = ()
    """One line for each run without scores: the run and the reason."""
    scores: Mapping[str, SeedStatistics] = field(default_factory=dict)
    """The scores by name: perplexity and bleu on the development set, test_bleu and compound_bleu
    on the test set."""
    p: Mapping[int, float] = field(default_factory=dict)
    """The p-value of the difference in test BLEU from the first row, by seed."""
    has_own_text: bool = False
    """Whether text or vocabulary differ from the first row's. If so, perplexities per token cannot
    be compared."""

    @property
    def num_seeds(self) -> int:
        """The number of seeds with scores."""
        return len(self.scores["perplexity"].values) if "perplexity" in self.scores else 0


@dataclass(frozen=True)
class Results:
    """The results of a sweep, whose other rows are compared with the first."""

    sweep: Sweep
    rows: Mapping[str, RowResult]
    signature: str
    """sacreBLEU's signature for the comparison of test BLEU, or "" if there is none."""
    command: str
    """The command that writes this report."""

    @property
    def base(self) -> RowResult:
        """The first row."""
        return next(iter(self.rows.values()))

    def difference(self, name: str, score: str) -> float | None:
        """Return a row's mean score minus the first row's; None if they cannot be compared."""
        ours, base = self.rows[name].scores.get(score), self.base.scores.get(score)
        if score == "perplexity" and self.rows[name].has_own_text:
            return None
        return None if ours is None or base is None else ours.mean - base.mean

    def paper_difference(self, name: str, score: PaperScore) -> float | None:
        """Return a row's score in the paper minus the first row's; None if one is missing."""
        ours, base = getattr(self.rows[name].paper, score), getattr(self.base.paper, score)
        return None if ours is None or base is None else ours - base

    def minimum_detectable_difference(self, score: str) -> float | None:
        """Return the smallest difference of two complete rows that seeds alone do not explain."""
        rows = self._rows_with(score)
        num_seeds = max((len(row.values) for row in rows), default=1)
        return detectable_difference(rows, num_seeds, num_seeds)

    def has_paper_sign(self, name: str, score: PaperScore) -> bool | None:
        """Return whether a row's difference has the paper's sign; None if one has no sign."""
        paper, ours = self.paper_difference(name, score), self.difference(name, score)
        return None if not paper or ours is None else (ours > 0) == (paper > 0)

    def is_significant(self, name: str, score: str) -> bool:
        """Return whether a row differs from the first row by more than seeds alone explain."""
        difference = self.difference(name, score)
        if difference is None:
            return False
        num_seeds = (len(row.scores[score].values) for row in (self.rows[name], self.base))
        least = detectable_difference(self._rows_with(score), *num_seeds)
        return least is not None and abs(difference) > least

    def _rows_with(self, score: str) -> list[SeedStatistics]:
        return [row.scores[score] for row in self.rows.values() if score in row.scores]


def collect_results(sweep: Sweep, statuses: Sequence[RunStatus], command: str) -> Results:
    """Collect the results of all runs so far; raise UsageError if no run is done."""
    if not any(status.status == "done" for status in statuses):
        raise UsageError(f"no run of {sweep.path} is done: there is nothing to report")
    by_row = {name: [s for s in statuses if s.run.row == name] for name in sweep.rows}
    p, signature = _compare_test_bleu(sweep, by_row)
    base_name, base = next(iter(sweep.rows.items()))
    base_texts = _fingerprints(by_row[base_name])
    rows = {
        name: replace(
            _collect_row(name, row, base, by_row[name]),
            p=p.get(name, {}),
            has_own_text=not _fingerprints(by_row[name]) <= base_texts,
        )
        for name, row in sweep.rows.items()
    }
    return Results(sweep, rows, signature, command)


def _collect_row(name: str, row: Row, base: Row, statuses: Sequence[RunStatus]) -> RowResult:
    config = _config_as_trained(statuses)
    model = build_transformer(config.model, config.data.vocab_size, config.data.source_vocab_size)
    changes = base.config.differences(row.config)
    changes.pop(("train", "seed"), None)
    done = [status for status in statuses if status.status == "done"]
    return RowResult(
        name,
        ", ".join(f"{key} {value}" for (_, key), (_, value) in changes.items()),
        row.paper,
        parameter_counts(model)["total"],
        _mean_flops(done),
        statuses,
        [
            f"{s.run.name}: {'has no scores' if s.status == 'done' else s.summary}"
            for s in statuses
            if s.status != "done" or "dev" not in s.scores
        ],
        _collect_scores(done),
    )


def _config_as_trained(statuses: Sequence[RunStatus]) -> Config:
    """Return the config of the first started run; if none has started, the planned config."""
    # A trained vocabulary may be smaller than requested.
    for status in statuses:
        with contextlib.suppress(KeyError, TypeError, ConfigError):
            return Config.from_dict(read_json_object(status.run.path / "run.json")["config"])
    return statuses[0].run.config


def _fingerprints(statuses: Sequence[RunStatus]) -> set[str]:
    """Return the fingerprints of the text and vocabulary that the runs were trained with."""
    fingerprints = set()
    for status in statuses:
        with contextlib.suppress(KeyError, TypeError):
            data = read_json_object(status.run.path / "run.json")["data"]
            fingerprints.add(str(data["fingerprint"]))
    return fingerprints


def _collect_scores(statuses: Sequence[RunStatus]) -> dict[str, SeedStatistics]:
    values: dict[str, list[float]] = {}
    for status in statuses:
        if dev := status.scores.get("dev"):
            values.setdefault("perplexity", []).append(float(dev["perplexity"]))
            values.setdefault("bleu", []).append(float(dev["bleu"]))
        if test := status.scores.get("test"):
            values.setdefault("test_bleu", []).append(float(test["bleu"]))
            tokenizer = bleu_tokenizer(status.run.config.data)
            # BLEU over characters has no words to split.
            if tokenizer != "char":
                bleu = compound_bleu(tokenizer, *_read_translations(status, "test"))
                values.setdefault("compound_bleu", []).append(bleu)
    return {name: SeedStatistics(tuple(seeds)) for name, seeds in values.items()}


def _mean_flops(statuses: Sequence[RunStatus]) -> tuple[float, float] | None:
    """Return the mean FLOPs of a training run, counted and by the paper's method."""
    all_reports = [read_metrics(status.run.path / "metrics.jsonl") for status in statuses]
    runs = [xs for reports in all_reports if (xs := [x for x in reports if x.get("flops")])]
    if not runs:
        return None
    counted = statistics.fmean(sum(x["flops"] for x in xs) for xs in runs)
    # Utilization is counted FLOPs over peak FLOPs.
    return counted, statistics.fmean(sum(x["flops"] / x["utilization"] for x in xs) for xs in runs)


def compound_bleu(tokenizer: str, hypotheses: list[str], references: list[str]) -> float:
    """Return BLEU as the paper computes it: tokenized, with compounds split at their hyphens."""
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    hypotheses, references = (
        [COMPOUND.sub(r"\1 ##AT##-##AT## \2", bleu.tokenizer(line)) for line in lines]
        for lines in (hypotheses, references)
    )
    return sacrebleu.BLEU(tokenize="none", force=True).corpus_score(hypotheses, [references]).score


def _compare_test_bleu(
    sweep: Sweep, by_row: Mapping[str, Sequence[RunStatus]]
) -> tuple[dict[str, dict[int, float]], str]:
    """Return the p-values of `RowResult` by row, and sacreBLEU's signature."""
    base = next(iter(by_row))
    bleu, _ = sacrebleu_metrics(bleu_tokenizer(sweep.rows[base].config.data), warn=False)
    p: dict[str, dict[int, float]] = {}
    signature = ""
    for seed in sweep.seeds:
        translations = {
            name: _read_translations(status, "test")
            for name, statuses in by_row.items()
            for status in statuses
            if status.status == "done" and status.run.seed == seed and "test" in status.evaluations
        }
        _, references = translations.get(base, ([], []))
        systems = [
            (name, lines) for name, (lines, target) in translations.items() if target == references
        ]
        if base not in translations or len(systems) < 2:
            continue
        signatures, results = bootstrap(systems, {"BLEU": bleu}, references)
        signature = str(signatures["BLEU"])
        baseline, *others = results["BLEU"]
        for (name, _), result in zip(systems[1:], others, strict=True):
            p.setdefault(name, {})[seed] = p_value(result, baseline)
    return p, signature


def _read_translations(status: RunStatus, split: Split) -> tuple[list[str], list[str]]:
    """Return the hypotheses and references of the newest evaluation on a split."""
    folder = status.evaluations[split]
    hypotheses, references = (
        (folder / f"{name}.txt").read_text("utf-8").split("\n")[:-1]
        for name in ("hypothesis", "reference")
    )
    return hypotheses, references
