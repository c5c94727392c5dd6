"""How good a model is: perplexity, BLEU and chrF (sections 6.1 and 6.2)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sacrebleu

from transformer_jax.config import DecodeConfig
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.encode import Progress, ignore_progress
from transformer_jax.data.prepare import Prepared, find_prepared
from transformer_jax.data.splits import Split
from transformer_jax.errors import DataError, StorageError, UsageError
from transformer_jax.inference.perplexity import SentenceScore, perplexity, score_sentences
from transformer_jax.inference.trained_run import Run, read_params
from transformer_jax.model.transformer import Params
from transformer_jax.runs.run_directory import write_json


@dataclass(frozen=True)
class Scores:
    """Scores of a set of translations, with what it takes to compare them."""

    sentences: int
    exact: float
    """Share of translations that equal their reference."""
    bleu: float
    bleu_signature: str
    precisions: list[float]
    """Of one to four words in a row, in percent: BLEU's parts."""
    brevity_penalty: float
    lengths: list[int]
    """Words of all translations, and of all references."""
    chrf: float
    chrf_signature: str

    @property
    def bleu_details(self) -> str:
        """BLEU's parts in one line."""
        parts = "/".join(f"{precision:.1f}" for precision in self.precisions)
        words, wanted = self.lengths
        return f"{parts} BP {self.brevity_penalty:.3f} ({words:,} for {wanted:,} words)"


def sacrebleu_metrics(
    tokenizer: str, *, warn: bool = True
) -> tuple[sacrebleu.BLEU, sacrebleu.CHRF]:
    """Return sacreBLEU's BLEU, over words as `tokenizer` parts them, and its chrF.

    Args:
        tokenizer: sacreBLEU's name for it.
        warn: whether BLEU warns of text that looks tokenised, where it is not meant to be.
    """
    force = tokenizer == "none" or not warn
    return sacrebleu.BLEU(tokenize=tokenizer, force=force), sacrebleu.CHRF()


def score(
    hypotheses: Sequence[str | None],
    references: Sequence[str | None],
    *,
    tokenizer: str = "13a",
) -> Scores:
    """Compare translations with one reference each, by sacreBLEU.

    Raises:
        DataError: there are not as many of one as of the other, none at all, or one is None:
            sacreBLEU itself would say 100, or leave a reference out.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} translations cannot be scored by {len(references)} references"
        )
    systems, wanted = _whole("translation", hypotheses), _whole("reference", references)
    bleu, chrf = sacrebleu_metrics(tokenizer)
    bleu_score = bleu.corpus_score(systems, [wanted])
    chrf_score = chrf.corpus_score(systems, [wanted])
    return Scores(
        sentences=len(wanted),
        exact=float(np.mean([h == r for h, r in zip(systems, wanted, strict=True)])),
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        precisions=list(bleu_score.precisions),
        brevity_penalty=bleu_score.bp,
        lengths=[bleu_score.sys_len, bleu_score.ref_len],
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
    )


def _whole(kind: str, lines: Sequence[str | None]) -> list[str]:
    whole = [line for line in lines if line is not None]
    if len(whole) < len(lines):
        raise DataError(f"{kind} {lines.index(None) + 1} is missing: it cannot be scored")
    return whole


class Evaluation(NamedTuple):
    """Translations of a set and what they are worth."""

    result: dict[str, Any]
    """How they came about, perplexity, `Scores`, and `per_checkpoint`, the same of each checkpoint by
    itself: plain data."""
    sources: list[str]
    hypotheses: list[str]
    references: list[str]
    scores: Scores
    sentences: list[SentenceScore]
    """What perplexity is made of, line by line."""
    per_checkpoint: tuple["Evaluation", ...] = ()
    """Of the checkpoints of a mean, each by itself."""


def prepare_split(split: Split, *, of: Run, progress: Progress = ignore_progress) -> Prepared:
    """Return the text of a run that has this set.

    Raises:
        UsageError: it has no such set.
        DataError: the text is not that of the run any more.
    """
    try:
        prepared = find_prepared(
            of.config.data, of.vocabulary, of.folder.fingerprint, progress=progress
        )
    except DataError as error:
        raise DataError(f"{of.folder.path}: {error}") from error
    if split not in prepared.report:
        raise UsageError(f"{of.folder.path} has no {split} set: its text was prepared without one")
    return prepared


def evaluate(
    run: Run,
    split: Split,
    decode: dict[str, Any],
    *,
    per_checkpoint: bool = False,
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Translate and score a set.

    Args:
        run: the model.
        split: which set.
        decode: fields of the run's `DecodeConfig` to change.
        per_checkpoint: score each checkpoint of the run's average by itself too, one after the other:
            there are never more than two sets of parameters.
        progress: told what is prepared or translated, how much is done, and of how much.

    Raises:
        UsageError: the corpus has no such set.
        DataError: a source is longer than the model reads, or the corpus is another one than
            that of the run.
    """
    prepared = prepare_split(split, of=run, progress=progress)
    sources, references = prepared.lines(split)
    translator = run.translator(**decode)
    tokenizer = bleu_tokenizer(run.config.data)

    def scored(params: Params, steps: tuple[int, ...], doing: str) -> Evaluation:
        done = 0

        def count(sentences: int) -> None:
            nonlocal done
            done += sentences
            progress(doing, done, len(sources))

        found = translator.translate(params, sources, progress=count)
        hypotheses = [best[0].text for best in found]
        scores = score(hypotheses, references, tokenizer=tokenizer)
        told = score_sentences(run.model, params, *prepared.tokens(split))
        result = {
            "split": split,
            "step": steps[-1],
            "steps": list(steps),
            "average_checkpoints": len(steps),
            "decode": asdict(translator.config),
            "perplexity": perplexity(told),
            **asdict(scores),
        }
        return Evaluation(result, sources, hypotheses, references, scores, told)

    doing = f"translating {split} by {run.folder.path.resolve().name}"
    evaluation = scored(run.params, run.steps, doing)
    if not per_checkpoint:
        return evaluation
    alone = tuple(
        scored(read_params(run.folder, run.model, [step]), (step,), f"{doing} at step {step}")
        for step in run.steps
    )
    evaluation.result["per_checkpoint"] = [
        {key: single.result[key] for key in ("step", "perplexity", *asdict(single.scores))}
        for single in alone
    ]
    return evaluation._replace(per_checkpoint=alone)


def save_evaluation(run: Run, evaluation: Evaluation) -> Path:
    """Write lines, what each is worth and, last, scores into the run's folder; return where.

    Checkpoints that were scored by themselves have folders of their own.

    Raises:
        StorageError: the folder cannot be written.
    """
    for single in evaluation.per_checkpoint:
        save_evaluation(run, single)
    folder = run.folder.path / "evaluations" / _name(evaluation.result)
    kinds = zip(("source", "hypothesis", "reference"), evaluation[1:4], strict=True)
    texts = {folder / f"{kind}.txt": text_of(lines) for kind, lines in kinds}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.exists() and path.read_bytes() != text for path, text in texts.items()):
            # What is there are scores of other lines than these: they go first.
            for scores in folder.glob("*.json"):
                scores.unlink()
        for path, text in texts.items():
            path.write_bytes(text)
        rows = [",".join(map(str, row)) for row in (SentenceScore._fields, *evaluation.sentences)]
        (folder / "sentences.csv").write_bytes(text_of(rows))
        write_json(folder / "scores.json", evaluation.result)
    except OSError as error:
        raise StorageError(f"the scores could not be kept: {error}") from error
    return folder


def text_of(lines: Sequence[str]) -> bytes:
    """Return the content of a file of these lines."""
    return "".join(f"{line}\n" for line in lines).encode()


def _name(result: dict[str, Any]) -> str:
    """Return a name that tells apart all ways in which a set can be translated.

    What differs from the defaults is named, and not what differs from the run's own config,
    which may change when the run goes on.
    """
    decode = dict(result["decode"])
    name = f"{result['split']}-step{result['step']}-average{result['average_checkpoints']}"
    name += f"-beam{decode.pop('beam_size')}-alpha{decode.pop('length_penalty_alpha'):g}"
    usual = {**asdict(DecodeConfig()), "average_checkpoints": decode["average_checkpoints"]}
    others = {key: value for key, value in decode.items() if value != usual[key]}
    return name + "".join(f"-{key.replace('_', '-')}-{value}" for key, value in others.items())
