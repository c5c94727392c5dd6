"""Whether one run is better than another, or only luckier: sacreBLEU's paired bootstrap."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sacrebleu.significance import PairedTest, Result

from transformer_jax.data.encode import Progress, ignore_progress
from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, StorageError
from transformer_jax.inference.evaluate import Evaluation, prepare_split, sacrebleu_metrics, text_of
from transformer_jax.inference.trained_run import Run
from transformer_jax.runs.run_directory import write_json

SAMPLES = 1000
# sacreBLEU's own default, whatever the environment says: a comparison repeats.
SEED = 12345


@dataclass(frozen=True)
class Comparison:
    """One score of two runs on the same sentences."""

    metric: str
    score: float
    """Of the run."""
    mean: float
    """Over resampled sets."""
    interval: float
    """Half the width of its 95 % interval, over resampled sets."""
    baseline: float
    """Of the other run."""
    baseline_mean: float
    baseline_interval: float
    p: float
    """How often a difference like this one comes by the choice of sentences alone."""
    signature: str


def check_comparable(
    run: Run, baseline: Run, split: Split, progress: Progress = ignore_progress
) -> None:
    """Make sure, before anything is translated, that two runs have the same references.

    Raises:
        UsageError: one of them has no such set.
        DataError: they differ, or a run's text is another one now.
    """
    ours, theirs = (
        prepare_split(split, of=one, progress=progress).lines(split)[1] for one in (run, baseline)
    )
    _check_same(ours, theirs, split)


def compare(evaluation: Evaluation, baseline: Evaluation, tokenizer: str) -> list[Comparison]:
    """Compare two evaluations of the same set, by BLEU and by chrF.

    Args:
        evaluation: of the run.
        baseline: of the other run, the baseline.
        tokenizer: how BLEU parts text into words.

    Raises:
        DataError: their references differ.
    """
    _check_same(evaluation.references, baseline.references, evaluation.result["split"])
    systems: list[tuple[str, Sequence[str]]] = [
        ("baseline", baseline.hypotheses),
        ("run", evaluation.hypotheses),
    ]
    # What there is to warn of was said when each was scored.
    bleu, chrf = sacrebleu_metrics(tokenizer, warn=False)
    signatures, found = bootstrap(systems, {"BLEU": bleu, "chrF2": chrf}, evaluation.references)
    return [
        Comparison(
            metric=name,
            score=ours.score,
            mean=_number(ours.mean),
            interval=_number(ours.ci),
            baseline=theirs.score,
            baseline_mean=_number(theirs.mean),
            baseline_interval=_number(theirs.ci),
            p=p_value(ours, theirs),
            signature=str(signatures[name]),
        )
        for name, (theirs, ours) in found.items()
    ]


def bootstrap(
    systems: Sequence[tuple[str, Sequence[str]]],
    by: Mapping[str, Any],
    references: Sequence[str],
) -> tuple[dict[str, Any], dict[str, list[Result]]]:
    """Compare systems with the first of them, by sacreBLEU's paired bootstrap.

    Args:
        systems: names and translations.
        by: sacreBLEU's metrics, by name.
        references: a line for each translation.

    Returns:
        Of each metric its signature, and a result for each system.
    """
    with _seeded():
        test = PairedTest(
            list(systems),
            dict(by),
            [list(references)],
            test_type="bs",
            n_samples=SAMPLES,
            n_jobs=1,
        )
        signatures, found = test()
    results: dict[str, Any] = found
    return dict(signatures), {name: results[name] for name in by}


def p_value(ours: Result, baseline: Result) -> float:
    """Return how often such a difference comes by the choice of sentences alone."""
    # Of no difference at all sacreBLEU says the least p there is.
    return 1.0 if ours.score == baseline.score else _number(ours.p_value)


def describe(baseline: Run, evaluation: Evaluation, compared: list[Comparison]) -> dict[str, Any]:
    """Return a comparison, and how it came about, as plain data.

    Args:
        baseline: the other run; of its path the name alone.
        evaluation: of the other run.
        compared: with it.
    """
    about = ("split", "step", "steps", "average_checkpoints", "decode", "sentences")
    return {
        "run": baseline.folder.path.resolve().name,
        **{key: evaluation.result[key] for key in about},
        "bleu_signature": evaluation.scores.bleu_signature,
        "chrf_signature": evaluation.scores.chrf_signature,
        "test": "paired bootstrap",
        "samples": SAMPLES,
        "seed": SEED,
        "scores": [asdict(comparison) for comparison in compared],
    }


def save_comparison(folder: Path, description: dict[str, Any], hypotheses: Sequence[str]) -> None:
    """Write the other run's lines and, last, what came of them beside the run's evaluation.

    The files are named by the run and a digest of its lines, for many runs are called seed-0.

    Raises:
        StorageError: the folder cannot be written.
    """
    text = text_of(hypotheses)
    name = f"baseline-{description['run']}-{hashlib.sha256(text).hexdigest()[:8]}"
    try:
        # Never a record beside half of its lines.
        (folder / f"{name}.json").unlink(missing_ok=True)
        (folder / f"{name}.txt").write_bytes(text)
        write_json(folder / f"{name}.json", description)
    except OSError as error:
        raise StorageError(f"the comparison could not be kept: {error}") from error


def _check_same(ours: list[str], theirs: list[str], split: Split) -> None:
    if len(ours) != len(theirs):
        raise DataError(
            f"the runs cannot be compared: one has {len(ours)} references in its {split} set, "
            f"the other {len(theirs)}"
        )
    for number, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        if pair[0] != pair[1]:
            our, their = (repr(line if len(line) <= 80 else f"{line[:80]}...") for line in pair)
            raise DataError(
                f"the runs cannot be compared: reference {number} of their {split} sets is "
                f"{our} in one, {their} in the other"
            )


@contextmanager
def _seeded() -> Iterator[None]:
    """Give sacreBLEU its seed where it looks for it: in the environment."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(SEED)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before


def _number(value: Any) -> float:
    """Return one of NumPy's numbers as Python's; sacreBLEU's types say that it may be None."""
    return float(value)
