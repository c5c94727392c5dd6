"""Test whether two runs differ significantly, with sacreBLEU's approximate randomization."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.base import Metric, Signature
from sacrebleu.significance import PairedTest, Result

from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, storage_errors
from transformer_jax.evaluation.evaluate import Evaluation, prepare_split
from transformer_jax.evaluation.evaluation_files import encode_lines
from transformer_jax.evaluation.scores import choose_tokenizer, sacrebleu_metrics
from transformer_jax.files import JsonObject, part_of_name, write_json
from transformer_jax.inference.trained_run import Run
from transformer_jax.remote.copies import uploading

SAMPLES = 1000
# sacreBLEU's default seed. A fixed seed makes comparisons reproducible in any environment.
SEED = 12345


@dataclass(frozen=True)
class MetricComparison:
    """The scores of a run and a baseline on the same sentences, for one metric."""

    metric: str
    score: float
    mean: float
    """The run's mean score over bootstrap samples of the sentences."""
    interval: float
    """Half the width of the 95% confidence interval."""
    baseline: float
    baseline_mean: float
    baseline_interval: float
    p: float
    """The probability of a difference at least this large if the runs are equally good."""
    signature: str


def check_comparable(run: Run, baseline: Run, split: Split) -> None:
    """Check that two runs have the same references, without translating anything."""
    ours, theirs = (prepare_split(one, split).lines(split)[1] for one in (run, baseline))
    _check_same_references(ours, theirs, split)


def compare(evaluation: Evaluation, baseline: Evaluation, tokenizer: str) -> list[MetricComparison]:
    """Compare two evaluations of the same split by BLEU and by chrF."""
    _check_same_references(evaluation.references, baseline.references, evaluation.result["split"])
    systems = [("baseline", baseline.hypotheses), ("run", evaluation.hypotheses)]
    # Suppress the warning about tokenized text, which was already issued for each evaluation.
    chosen = choose_tokenizer(tokenizer, evaluation.references)
    metrics = dict(zip(("BLEU", "chrF2"), sacrebleu_metrics(chosen, warn=False), strict=True))
    signatures, results = paired_test(systems, metrics, evaluation.references, SAMPLES)
    texts = evaluation.hypotheses, baseline.hypotheses, evaluation.references
    return [
        MetricComparison(
            name,
            *_score_mean_interval(ours),
            *_score_mean_interval(theirs),
            p_value(ours, theirs, count_different(metrics[name], *texts)),
            str(signatures[name]),
        )
        for name, (theirs, ours) in results.items()
    ]


def paired_test(
    systems: Sequence[tuple[str, Sequence[str]]],
    metrics: Mapping[str, Metric],
    references: Sequence[str],
    resamples: int = -1,
) -> tuple[dict[str, Signature], dict[str, list[Result]]]:
    """Compare each named system with the first; return the signatures and results by metric.

    The test exchanges the translations of randomly chosen sentences (Riezler and Maxwell 2005), and
    its p-values are two-sided. Those of sacreBLEU's paired bootstrap are approximately one-sided.
    `resamples` is the number of bootstrap samples for the intervals of the scores, or -1 for none.
    """
    options = {"test_type": "ar", "n_samples": SAMPLES, "n_ar_confidence": resamples, "n_jobs": 1}
    before = dict(os.environ)
    # sacreBLEU reads its seed only from the environment.
    os.environ["SACREBLEU_SEED"] = str(SEED)
    try:
        test = PairedTest(list(systems), dict(metrics), [list(references)], **options)
        signatures, scores = test()
    finally:
        os.environ.pop("SACREBLEU_SEED")
        os.environ.update(before)
    results: dict[str, Any] = scores
    return dict(signatures), {name: results[name] for name in metrics}


def count_different(
    metric: Metric, ours: Sequence[str], theirs: Sequence[str], references: Sequence[str]
) -> int:
    """Return how many sentences have translations that the metric does not score equally."""

    def scores(line: str, reference: str) -> dict[str, Any]:
        return vars(metric.corpus_score([line], [[reference]]))

    lines = zip(ours, theirs, references, strict=True)
    return sum(x != y and scores(x, target) != scores(y, target) for x, y, target in lines)


def p_value(ours: Result, baseline: Result, num_different: int) -> float:
    """Return the p-value of the difference between a system and the baseline.

    sacreBLEU counts only differences that exceed the observed one. With few different sentences,
    many samples have exactly the observed difference: those that exchange all `num_different`
    sentences or none of them. This function adds their probability.
    """
    if ours.score == baseline.score:
        return 1.0
    return min(1.0, float(ours.p_value or 0) + 2.0 ** (1 - num_different))


def describe(
    baseline: Run, evaluation: Evaluation, comparisons: Sequence[MetricComparison]
) -> JsonObject:
    """Return a comparison, including the baseline's evaluation, as JSON data without paths."""
    keys = ("split", "step", "steps", "average_checkpoints", "decode", "sentences")
    return {
        "run": baseline.folder.path.resolve().name,
        **{key: evaluation.result[key] for key in keys},
        "bleu_signature": evaluation.scores.bleu_signature,
        "chrf_signature": evaluation.scores.chrf_signature,
        "test": "approximate randomization",
        "samples": SAMPLES,
        "seed": SEED,
        "scores": [asdict(comparison) for comparison in comparisons],
    }


def save_comparison(
    folder: Path, description: Mapping[str, object], hypotheses: Sequence[str]
) -> None:
    """Save a comparison and the baseline's translations, named by their digest."""
    text = encode_lines(hypotheses)
    run = part_of_name(str(description["run"]))
    name = f"baseline-{run}-{hashlib.sha256(text).hexdigest()[:8]}"
    problem = f"the comparison could not be saved in {folder}"
    with uploading(folder, [f"{name}.txt", f"{name}.json"]), storage_errors(problem):
        # Delete the old comparison first, so that no comparison is stored with the wrong
        # translations.
        (folder / f"{name}.json").unlink(missing_ok=True)
        (folder / f"{name}.txt").write_bytes(text)
        write_json(folder / f"{name}.json", description)


def _check_same_references(ours: list[str], theirs: list[str], split: str) -> None:
    if len(ours) != len(theirs):
        raise DataError(
            f"the runs cannot be compared: one has {len(ours)} references in its {split} set, and "
            f"the other has {len(theirs)}"
        )
    for number, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        if pair[0] != pair[1]:
            our, their = (repr(line if len(line) <= 80 else f"{line[:80]}...") for line in pair)
            raise DataError(
                f"the runs cannot be compared: reference {number} of their {split} sets is "
                f"{our} in one, {their} in the other"
            )


def _score_mean_interval(result: Result) -> tuple[float, float, float]:
    # These values are NumPy numbers, but sacreBLEU's type annotations also allow None.
    return result.score, float(result.mean or 0), float(result.ci or 0)
