"""Compare the test-set translations that `evaluate` stored for each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformer_jax.analysis.significance import bootstrap, p_value
from transformer_jax.evaluation.scores import sacrebleu_metrics
from transformer_jax.sweeps.status import RunStatus


class BleuDifference(NamedTuple):
    """The difference in test BLEU between a run and the first row's run with the same seed."""

    bleu: float
    p: float
    """The p-value of a paired bootstrap test over sentences."""


def read_translations(folder: Path) -> tuple[list[str], list[str]]:
    """Return the hypotheses and references from an evaluation's folder."""
    hypotheses, references = (
        (folder / f"{name}.txt").read_text("utf-8").split("\n")[:-1]
        for name in ("hypothesis", "reference")
    )
    return hypotheses, references


def compare_test_bleu(
    tokenizer: str, by_row: Mapping[str, Sequence[RunStatus]]
) -> tuple[dict[str, dict[int, BleuDifference]], str]:
    """Compare each run with the first row's run that has the same seed, if the references match.

    Return the differences, keyed by row and seed, and the sacreBLEU signature. The signature
    is "" if there are no differences.
    """
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    base = next(iter(by_row))
    differences: dict[str, dict[int, BleuDifference]] = {}
    signature = ""
    for seed in sorted({status.run.seed for status in by_row[base]}):
        translations = {
            name: read_translations(status.evaluations["test"])
            for name, statuses in by_row.items()
            for status in statuses
            if status.run.seed == seed and "test" in status.evaluations
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
            difference = BleuDifference(result.score - baseline.score, p_value(result, baseline))
            differences.setdefault(name, {})[seed] = difference
    return differences, signature
