"""Whether one run is better than another, or only luckier: sacreBLEU's paired bootstrap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.significance import PairedTest, Result

from transformer_jax.errors import DataError
from transformer_jax.inference.evaluate import Evaluation, metrics

SAMPLES = 1000


@dataclass(frozen=True)
class Comparison:
    """One score of two runs on the same sentences."""

    metric: str
    score: float
    """Of the run."""
    interval: float
    """Half the width of its 95 % interval, over resampled sets."""
    against: float
    """Of the other run."""
    against_interval: float
    p: float
    """How often a difference like this one comes by the choice of sentences alone."""
    signature: str


def compare(evaluation: Evaluation, against: Evaluation, tokenizer: str) -> list[Comparison]:
    """Compare two evaluations of the same set, by BLEU and by chrF.

    Args:
        evaluation: of the run.
        against: of the other run, the baseline.
        tokenizer: how BLEU parts text into words.

    Raises:
        DataError: they are not of the same sentences.
    """
    pairs = [list(zip(e.sources, e.references, strict=True)) for e in (evaluation, against)]
    if pairs[0] != pairs[1]:
        sizes = " and ".join(f"{len(p)} sentences" for p in pairs)
        raise DataError(f"the two runs have other {evaluation.result['set']} sets: {sizes}")
    systems: list[tuple[str, Sequence[str]]] = [
        ("against", against.hypotheses),
        ("run", evaluation.hypotheses),
    ]
    bleu, chrf = metrics(tokenizer)
    test = PairedTest(
        systems,
        {"BLEU": bleu, "chrF2": chrf},
        [evaluation.references],
        test_type="bs",
        n_samples=SAMPLES,
    )
    signatures, found = test()
    return [
        Comparison(
            metric=name,
            score=ours.score,
            interval=_number(ours.ci),
            against=theirs.score,
            against_interval=_number(theirs.ci),
            # Of no difference at all sacreBLEU says the least p there is.
            p=1.0 if ours.score == theirs.score else _number(ours.p_value),
            signature=str(signatures[name]),
        )
        for name, (theirs, ours) in _results(found).items()
    ]


def _results(found: dict[str, Any]) -> dict[str, list[Result]]:
    return {name: results for name, results in found.items() if name != "System"}


def _number(value: Any) -> float:
    """Return one of NumPy's numbers as Python's; sacreBLEU's types say that it may be None."""
    return float(value)
