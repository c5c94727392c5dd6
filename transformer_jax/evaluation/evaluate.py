"""Evaluate a model by perplexity, BLEU, and chrF (sections 6.1 and 6.2)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from transformer_jax import progress
from transformer_jax.data.batches import Batches, Ragged
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.encode import SIDES
from transformer_jax.data.number_words import SEPARATOR, count_digits
from transformer_jax.data.prepare import Prepared
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.data.text_files import TextFiles, note_mistakes
from transformer_jax.data.unknown import note_unknown
from transformer_jax.errors import DataError, Setting, UsageError
from transformer_jax.evaluation.perplexity import (
    SentenceScore,
    perplexity,
    score_sentences,
    scoring_batches,
)
from transformer_jax.evaluation.scores import (
    Scores,
    check_tokenizer,
    choose_tokenizer,
    compound_bleu,
    sacrebleu_metrics,
    score,
)
from transformer_jax.evaluation.tasks import check_task, score_task
from transformer_jax.files import JsonObject, part_of_name
from transformer_jax.inference.pairs import check_lengths
from transformer_jax.inference.trained_run import Option, Run, read_params

Files = tuple[Path, Path]
"""A source file and a target file."""


class EvaluationText(NamedTuple):
    """Parallel text to translate and score."""

    name: str
    """The start of the evaluation folder's name: a split, or "on-FILE-DIGEST" for files."""
    title: str
    sources: list[str]
    references: list[str]
    batches: Batches


class Evaluation(NamedTuple):
    """The translations of a text and their scores."""

    result: JsonObject
    """The evaluation as JSON data: the settings, the perplexity, the fields in `Scores`,
    `compound_bleu`, and `by_length` (scores for ranges of source length). There can also be
    `by_digits` (counts of correct numbers), `task` (the scores of the task that `data.task`
    selects), `per_checkpoint` (scores of each averaged checkpoint), and `members` (the runs of an
    ensemble, whose first run determines the steps)."""
    sources: list[str]
    hypotheses: list[str]
    references: list[str]
    scores: Scores
    sentences: list[SentenceScore]
    per_checkpoint: tuple["Evaluation", ...] = ()
    """A separate evaluation of each averaged checkpoint, if requested."""

    def __repr__(self) -> str:
        scores = f"perplexity {self.result['perplexity']:.3f}, BLEU {self.scores.bleu:.2f}"
        return f"Evaluation({self.result['title']}: {scores}, {len(self.sources)} lines)"


def prepare_split(run: Run, split: Split) -> Prepared:
    """Return the prepared text of a run, after checking that it contains this split."""
    path = run.folder.path
    try:
        prepared = run.folder.find_text()
    except DataError as error:
        reason, *settings = error.parts
        if settings:
            # A file is missing. The error suggests a different data folder, which only `resume`
            # accepts. A package cannot resume.
            reason = f"{str(reason).partition(':')[0]}; if the text has moved, "
            if run.folder.package is None:
                reason += "resume the run with "
            else:
                reason += "set TRANSFORMER_JAX_DATA to its folder"
                settings.clear()
        raise DataError(f"{path}: ", reason, *settings) from error
    if split not in prepared.report:
        raise UsageError(
            f"{path} has no {split} set, because its text was prepared without one: use ",
            Setting("split", "dev"),
        )
    return prepared


def read_lines(files: Files) -> tuple[list[str], list[str]]:
    """Read parallel text from two files, which may be compressed."""
    for path in files:
        if not path.exists():
            raise DataError(f"there is no file {path}")
    source, target = (str(path.absolute()) for path in files)
    corpus = TextFiles(dict.fromkeys(SPLITS, (source, target)), folder=None)
    pairs = list(corpus.read("test"))
    return [source for source, _ in pairs], [target for _, target in pairs]


def read_files(run: Run, files: Files) -> EvaluationText:
    """Read parallel text from files outside the run's corpus."""
    sources, references = read_lines(files)
    encoded = [
        Ragged.from_lists(tokenizer.encode(lines))
        for tokenizer, lines in zip(run.vocabulary, (sources, references), strict=True)
    ]
    check_lengths([path.name for path in files], encoded, run.config.model.max_lengths)
    digest = hashlib.sha256("\n".join([*sources, *references]).encode()).hexdigest()[:8]
    names = [path.name.encode(errors="backslashreplace").decode() for path in files]
    note_mistakes(names, (sources, references))
    name, title = f"on-{part_of_name(names[0])}-{digest}", " and ".join(names)
    batches = scoring_batches(*encoded)
    return EvaluationText(name, title, sources, references, batches)


def read_text(run: Run, text: Split | Files) -> EvaluationText:
    """Read a split of the run's text, or text in other files, and check that it can be scored."""
    if isinstance(text, tuple):
        content = read_files(run, text)
    else:
        prepared = prepare_split(run, text)
        batches = scoring_batches(*prepared.tokens(text))
        content = EvaluationText(text, f"{text} set", *prepared.lines(text), batches)
    check_task(run.config.data.task, content.sources, content.references)
    check_tokenizer(bleu_tokenizer(run.config.data), content.references)
    texts = (content.sources, content.references)
    for side, tokenizer, lines in zip(SIDES, run.vocabulary, texts, strict=True):
        note_unknown(f"{content.title}, {side}", tokenizer, lines)
    return content


def evaluate_text(
    run: Run,
    text: EvaluationText,
    decode: Mapping[str, Option],
    *,
    sentences: list[SentenceScore] | None = None,
) -> Evaluation:
    """Translate and score a text with the run's parameters, and advance the current task.

    `sentences` may contain the sentence scores of these parameters on this text, which do not
    depend on `decode`.
    """
    translator = run.translator(**decode)
    tokenizer = choose_tokenizer(bleu_tokenizer(run.config.data), text.references)
    best = translator.translate(run.params, text.sources)
    hypotheses = [candidates[0].text for candidates in best]
    scores = score(hypotheses, text.references, tokenizer=tokenizer)
    if sentences is None:
        sentences = score_sentences(run.model, run.params, text.batches)
    result = {
        "split": text.name,
        "title": text.title,
        "step": run.step,
        "steps": list(run.steps),
        "average_checkpoints": len(run.steps),
        "decode": asdict(replace(translator.config, average_checkpoints=len(run.steps))),
        "perplexity": perplexity(sentences),
        **asdict(scores),
        "compound_bleu": compound_bleu(tokenizer, hypotheses, text.references),
        "by_length": score_by_length(hypotheses, text.references, sentences, tokenizer),
    }
    if run.config.data.corpus == "number_words" and text.name in SPLITS:
        result["by_digits"] = score_by_digits(text.sources, hypotheses, text.references)
    task = score_task(run.config.data.task, text.sources, hypotheses, text.references)
    if task is not None:
        result["task"] = task
    if members := run.describe_members():
        result["members"] = members
    return Evaluation(result, text.sources, hypotheses, text.references, scores, sentences)


def evaluate(
    run: Run, text: Split | Files, decode: Mapping[str, Option], *, per_checkpoint: bool = False
) -> Evaluation:
    """Translate and score a split of the run's text, or text in other files.

    `decode` overrides fields in the run's `DecodeConfig`. With `per_checkpoint`, the function also
    evaluates each averaged checkpoint separately, with at most two sets of parameters in memory.
    """
    run.config.decode.change(**decode)
    kind = "an ensemble" if run.describe_members() else run.folder.package and "a package"
    if per_checkpoint and kind:
        raise UsageError(f"{run.folder.path} is {kind} and has no separate checkpoints")
    content = read_text(run, text)
    name = run.folder.path.resolve().name
    description = f"translating {content.title.removesuffix(' set')} with {name}"

    def evaluate_one(one: Run, suffix: str = "") -> Evaluation:
        with progress.task(f"{description}{suffix}", len(content.sources)):
            return evaluate_text(one, content, decode)

    evaluation = evaluate_one(run)
    if not per_checkpoint:
        return evaluation
    evaluations: list[Evaluation] = []
    for step in run.steps:
        one = Run(run.folder, read_params(run.folder, [step]), (step,))
        evaluations.append(evaluate_one(one, f" at step {step}"))
    evaluation.result["per_checkpoint"] = [
        {
            key: single.result[key]
            for key in ("step", "perplexity", *asdict(single.scores), "task")
            if key in single.result
        }
        for single in evaluations
    ]
    return evaluation._replace(per_checkpoint=tuple(evaluations))


# The width of a bucket, in source tokens. The last bucket has no upper limit.
BUCKET_WIDTH = 10
LAST_BUCKET = 60


def score_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sentences: Sequence[SentenceScore],
    tokenizer: str,
    *,
    last_bucket: int = LAST_BUCKET,
) -> list[JsonObject]:
    """Return BLEU and perplexity for sentences with 1 to 10 source tokens, 11 to 20, and so on.

    The number of tokens includes the end-of-sentence token. Sentences with more than `last_bucket`
    tokens form one bucket, whose "last" value is None. Buckets without sentences are omitted.
    """
    members: dict[int, list[int]] = {}
    for index, sentence in enumerate(sentences):
        start = min((sentence.source_tokens - 1) // BUCKET_WIDTH * BUCKET_WIDTH, last_bucket)
        members.setdefault(start, []).append(index)
    bleu, _ = sacrebleu_metrics(tokenizer, warn=False)
    return [
        {
            "first": start + 1,
            "last": start + BUCKET_WIDTH if start < last_bucket else None,
            "sentences": len(indices),
            "bleu": bleu.corpus_score(
                [hypotheses[i] for i in indices], [[references[i] for i in indices]]
            ).score,
            "perplexity": perplexity([sentences[i] for i in indices]),
        }
        for start, indices in sorted(members.items())
    ]


def score_by_digits(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> list[JsonObject]:
    """Count the numbers that are translated exactly, grouped by their number of digits."""
    is_right: dict[int, list[bool]] = {}
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True):
        sides = (line.split(SEPARATOR) for line in (source, reference))
        translated = hypothesis.split(SEPARATOR)
        for index, (number, expected) in enumerate(zip(*sides, strict=True)):
            found = is_right.setdefault(count_digits(number), [])
            found.append(translated[index : index + 1] == [expected])
    return [
        {"digits": digits, "numbers": len(found), "right": sum(found)}
        for digits, found in sorted(is_right.items())
    ]
