"""How good a model is: perplexity, BLEU and chrF (sections 6.1 and 6.2)."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import sacrebleu

from transformer_jax.data.batches import Batch, Batches, Ragged
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.prepare import prepare
from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, StorageError
from transformer_jax.inference.run import Run
from transformer_jax.model.losses import Loss, cross_entropy
from transformer_jax.model.transformer import Params, Transformer
from transformer_jax.runs.folder import write_json

# Positions of a batch when only the loss is computed.
SCORING_TOKENS = 4096


@dataclass(frozen=True)
class Scores:
    """Scores of a set of translations, with what it takes to compare them."""

    sentences: int
    exact: float
    """Share of translations that equal their reference."""
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenizer: str = "13a"
) -> Scores:
    """Compare translations with one reference each, by sacreBLEU.

    Raises:
        DataError: there are not as many of one as of the other, or none at all: sacreBLEU
            itself would say 100.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} translations cannot be scored by {len(references)} references"
        )
    bleu, chrf = sacrebleu.BLEU(tokenize=tokenizer), sacrebleu.CHRF()
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    return Scores(
        sentences=len(references),
        exact=float(np.mean([h == r for h, r in zip(hypotheses, references, strict=True)])),
        bleu=bleu_score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
    )


@functools.partial(jax.jit, static_argnames="model")
def _loss(params: Params, batch: Batch, *, model: Transformer) -> Loss:
    logits: Any = model.apply({"params": params}, *batch)
    return cross_entropy(logits, batch.target, smoothing=0.0)


def perplexity(model: Transformer, params: Params, source: Ragged, target: Ragged) -> float:
    """Return the perplexity per piece, the end counted, without label smoothing (Table 3)."""
    batches = Batches(source, target, batch_tokens=SCORING_TOKENS, seed=0)
    losses = [_loss(params, batches[i], model=model) for i in range(batches.per_epoch)]
    nll = math.fsum(float(loss.nll) for loss in losses)
    return math.exp(min(nll / math.fsum(float(loss.count) for loss in losses), 700.0))


class Evaluation(NamedTuple):
    """Translations of a set and what they are worth."""

    result: dict[str, Any]
    """Perplexity, the fields of `Scores`, and how they came about: plain data."""
    sources: list[str]
    hypotheses: list[str]
    references: list[str]


def evaluate(
    run: Run,
    split: Split,
    decode: dict[str, Any],
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Evaluation:
    """Translate and score a set.

    Args:
        run: the model.
        split: which set.
        decode: fields of the run's `DecodeConfig` to change.
        progress: told after each batch how many sentences it had, and how many there are.

    Raises:
        DataError: a source is longer than the model reads, or the corpus is another one than
            that of the run.
    """
    prepared = prepare(run.config.data, run.vocabulary, run.folder.fingerprint)
    sources, references = prepared.lines(split)
    translator = run.translator(**decode)
    translated = translator.translate(
        run.params, sources, progress=lambda done: progress(done, len(sources))
    )
    hypotheses = [best[0].text for best in translated]
    scores = score(hypotheses, references, tokenizer=bleu_tokenizer(run.config.data))
    result = {
        "set": split,
        "step": run.step,
        "average": run.average,
        "decode": asdict(translator.config),
        "perplexity": perplexity(run.model, run.params, *prepared.pieces(split)),
        **asdict(scores),
    }
    return Evaluation(result, sources, hypotheses, references)


def keep(run: Run, evaluation: Evaluation) -> Path:
    """Write lines and, last, scores into the run's folder; return where.

    Raises:
        StorageError: the folder cannot be written.
    """
    result = evaluation.result
    beam = result["decode"]["beam_size"]
    name = f"{result['set']}-step{result['step']}-average{result['average']}-beam{beam}"
    folder = run.folder.path / "evaluations" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, lines in zip(("source", "hypothesis", "reference"), evaluation[1:], strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{kind}.txt").write_text(text, "utf-8")
        write_json(folder / "scores.json", result)
    except OSError as error:
        raise StorageError(f"the scores could not be kept: {error}") from error
    return folder
