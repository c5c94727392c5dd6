"""Evaluate a model by perplexity, BLEU, and chrF (sections 6.1 and 6.2)."""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sacrebleu

from transformer_jax.data.batches import Ragged
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.encode import Progress, ignore_progress
from transformer_jax.data.prepare import Prepared, find_prepared
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.text_files import TextFiles
from transformer_jax.errors import DataError, UsageError
from transformer_jax.inference.perplexity import SentenceScore, perplexity, score_sentences
from transformer_jax.inference.tasks import score_task
from transformer_jax.inference.trained_run import Run, read_params
from transformer_jax.model.transformer import Params

# The paper's script splits text as bytes, so only ASCII whitespace separates words.
COMPOUND = re.compile(r"(\S)-(\S)", re.ASCII)
Files = tuple[Path, Path]
"""A source file and a target file."""


@dataclass(frozen=True)
class Scores:
    """Scores of translations, with the sacreBLEU details needed for comparisons."""

    sentences: int
    exact: float
    """The fraction of translations that are identical to their reference."""
    bleu: float
    """BLEU, in percent."""
    bleu_signature: str
    precisions: list[float]
    """BLEU's n-gram precisions, in percent, for n from 1 to 4."""
    brevity_penalty: float
    lengths: list[int]
    """The total numbers of words in the translations and in the references."""
    chrf: float
    """chrF2, in percent."""
    chrf_signature: str

    @property
    def bleu_details(self) -> str:
        """The precisions, brevity penalty, and lengths in one line."""
        precisions = "/".join(f"{precision:.1f}" for precision in self.precisions)
        words, expected = self.lengths
        return f"{precisions} BP {self.brevity_penalty:.3f} ({words:,} for {expected:,} words)"


class Text(NamedTuple):
    """Parallel text to translate and score."""

    name: str
    """A split, or "on-FILE-DIGEST" for text in files. The evaluation's directory name starts with
    it."""
    title: str
    sources: list[str]
    references: list[str]
    tokens: tuple[Ragged, Ragged]


class Evaluation(NamedTuple):
    """The translations of a text and their scores."""

    result: dict[str, Any]
    """The scores as JSON data: how the translations were produced, the perplexity, the fields of
    `Scores`, `compound_bleu`, the scores of a task other than translation in `task`, and the same
    scores for each single checkpoint in `per_checkpoint`."""
    sources: list[str]
    hypotheses: list[str]
    references: list[str]
    scores: Scores
    sentences: list[SentenceScore]
    per_checkpoint: tuple["Evaluation", ...] = ()
    """A separate evaluation of each averaged checkpoint, if requested."""


def sacrebleu_metrics(
    tokenizer: str, *, warn: bool = True
) -> tuple[sacrebleu.BLEU, sacrebleu.CHRF]:
    """Return BLEU with this tokenizer, and chrF. If `warn`, BLEU warns about tokenized text."""
    force = tokenizer == "none" or not warn
    return sacrebleu.BLEU(tokenize=tokenizer, force=force), sacrebleu.CHRF()


def score(
    hypotheses: Sequence[str | None], references: Sequence[str | None], *, tokenizer: str = "13a"
) -> Scores:
    """Score translations with sacreBLEU, against one reference each.

    Raises:
        DataError: the numbers of translations and references differ or are zero, or a line is
            missing. In these cases, sacreBLEU itself may return 100 or ignore a reference.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"cannot score {len(hypotheses)} translations with {len(references)} references"
        )
    systems = _check_complete("translation", hypotheses)
    expected = _check_complete("reference", references)
    bleu, chrf = sacrebleu_metrics(tokenizer)
    bleu_score = bleu.corpus_score(systems, [expected])
    chrf_score = chrf.corpus_score(systems, [expected])
    return Scores(
        sentences=len(expected),
        exact=float(np.mean([h == r for h, r in zip(systems, expected, strict=True)])),
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        precisions=list(bleu_score.precisions),
        brevity_penalty=bleu_score.bp,
        lengths=[bleu_score.sys_len, bleu_score.ref_len],
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
    )


def compound_bleu(
    tokenizer: str, hypotheses: Sequence[str], references: Sequence[str]
) -> float | None:
    """Return BLEU computed as in the paper, which uses Tensor2Tensor's `get_ende_bleu.sh`.

    Both sides are tokenized as in Moses's `tokenizer.perl -l de`, and split at hyphens. BLEU is
    computed as in `multi-bleu.perl`, without smoothing. If `tokenizer` is "none", the text
    must already be tokenized. Return None if `tokenizer` splits text into characters, which have no
    compounds.
    """
    if tokenizer in ("char", "zh"):
        return None
    sides = hypotheses, references
    if tokenizer != "none":
        from sacremoses import MosesTokenizer

        moses = MosesTokenizer("de")
        sides = tuple([" ".join(moses.tokenize(line)) for line in side] for side in sides)
    systems, expected = ([COMPOUND.sub(r"\1 ##AT##-##AT## \2", x) for x in side] for side in sides)
    bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(systems, [expected]).score


def prepare_split(split: Split, *, of: Run, progress: Progress = ignore_progress) -> Prepared:
    """Return the prepared text of a run, after checking that it contains this split.

    Raises:
        UsageError: the text has no such split.
        DataError: the text has changed since the run was created.
    """
    path = of.folder.path
    try:
        prepared = find_prepared(
            of.config.data, of.vocabulary, of.folder.fingerprint, progress=progress
        )
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if split not in prepared.report:
        raise UsageError(f"{path} has no {split} set: its text was prepared without one")
    return prepared


def read_files(run: Run, files: Files) -> Text:
    """Read parallel text from files outside the run's corpus.

    Raises:
        DataError: a file cannot be used, or a target is too long for the model.
    """
    for path in files:
        if not path.exists():
            raise DataError(f"there is no file {path}")
    source, target = (str(path.absolute()) for path in files)
    corpus = TextFiles(dict.fromkeys(SPLITS, (source, target)), folder=None)
    sources, references = map(list, zip(*corpus.read("test"), strict=True))
    encoded = run.vocabulary.source.encode(sources), run.vocabulary.target.encode(references)
    longest = run.config.model.max_lengths[1]
    for number, tokens in enumerate(encoded[1], start=1):
        if longest is not None and len(tokens) > longest:
            raise DataError(
                f"{files[1].name}, line {number}: {len(tokens)} tokens, and the model writes at "
                f"most {longest} (model.max_positions)"
            )
    digest = hashlib.sha256("\n".join([*sources, *references]).encode()).hexdigest()[:8]
    names = [path.name.encode(errors="backslashreplace").decode() for path in files]
    name, title = f"on-{names[0][:60]}-{digest}", " and ".join(names)
    source_tokens, target_tokens = map(_ragged, encoded)
    return Text(name, title, sources, references, (source_tokens, target_tokens))


def _ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    offsets = np.cumsum([0, *map(len, sequences)])
    return Ragged(np.fromiter(itertools.chain.from_iterable(sequences), np.int32), offsets)


def _read(run: Run, text: Split | Files, progress: Progress) -> Text:
    if isinstance(text, tuple):
        return read_files(run, text)
    prepared = prepare_split(text, of=run, progress=progress)
    return Text(text, f"{text} set", *prepared.lines(text), prepared.tokens(text))


def evaluate(
    run: Run,
    text: Split | Files,
    decode: Mapping[str, Any],
    *,
    per_checkpoint: bool = False,
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Translate and score a split of the run's text, or text in other files.

    `decode` overrides fields of the run's `DecodeConfig`. `per_checkpoint` also evaluates each
    averaged checkpoint separately, with at most two sets of parameters in memory. The function
    calls `progress` with a description, the number of finished sentences, and the total.

    Raises the errors of `prepare_split` or `read_files`, or a DataError if a source is too long for
    the model.
    """
    if per_checkpoint and run.folder.package is not None:
        raise UsageError(f"{run.folder.path} is a package, which has no separate checkpoints")
    name, title, sources, references, tokens = _read(run, text, progress)
    translator, tokenizer = run.translator(**decode), bleu_tokenizer(run.config.data)

    def evaluate_params(params: Params, steps: tuple[int, ...], description: str) -> Evaluation:
        num_done = 0

        def report(sentences: int) -> None:
            nonlocal num_done
            num_done += sentences
            progress(description, num_done, len(sources))

        best = translator.translate(params, sources, progress=report)
        hypotheses = [candidates[0].text for candidates in best]
        scores = score(hypotheses, references, tokenizer=tokenizer)
        sentences = score_sentences(run.model, params, *tokens)
        result = {
            "split": name,
            "title": title,
            "step": steps[-1],
            "steps": list(steps),
            "average_checkpoints": len(steps),
            "decode": asdict(translator.config),
            "perplexity": perplexity(sentences),
            **asdict(scores),
            "compound_bleu": compound_bleu(tokenizer, hypotheses, references),
        }
        task = score_task(run.config.data.task, sources, hypotheses, references)
        if task is not None:
            result["task"] = task
        return Evaluation(result, sources, hypotheses, references, scores, sentences)

    description = f"translating {title.removesuffix(' set')} with {run.folder.path.resolve().name}"
    evaluation = evaluate_params(run.params, run.steps, description)
    if not per_checkpoint:
        return evaluation
    singles: list[Evaluation] = []
    for step in run.steps:
        params = read_params(run.folder, run.model, [step])
        singles.append(evaluate_params(params, (step,), f"{description} at step {step}"))
    evaluation.result["per_checkpoint"] = [
        {
            key: single.result[key]
            for key in ("step", "perplexity", *asdict(single.scores), "task")
            if key in single.result
        }
        for single in singles
    ]
    return evaluation._replace(per_checkpoint=tuple(singles))


def _check_complete(kind: str, lines: Sequence[str | None]) -> list[str]:
    complete = [line for line in lines if line is not None]
    if len(complete) < len(lines):
        raise DataError(f"{kind} {lines.index(None) + 1} is missing, so there is no score")
    return complete
