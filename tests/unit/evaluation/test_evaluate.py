import dataclasses
import gzip
import math
import re
from pathlib import Path

import pytest
import sacrebleu
from example_configs import read_pairs
from run_files import write_untrained_run

from transformer_jax.data.prepare import prepare_text
from transformer_jax.errors import DataError
from transformer_jax.evaluation.evaluate import (
    Evaluation,
    evaluate,
    read_files,
    score_by_digits,
    score_by_length,
)
from transformer_jax.evaluation.perplexity import (
    SentenceScore,
    perplexity,
    score_sentences,
    scoring_batches,
)
from transformer_jax.evaluation.scores import score
from transformer_jax.inference.trained_run import Run, load, read_params
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.progress import Note
from transformer_jax.runs.run_folder import evaluation_folders

GREEDY = {"beam_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = write_untrained_run(tmp_path_factory.mktemp("runs") / "run", scale=3.0)
    return load(run.path, average_checkpoints=1)


@pytest.fixture(scope="module")
def evaluation(run: Run) -> Evaluation:
    return evaluate(run, "dev", GREEDY)


def test_an_evaluation_describes_its_scores(run: Run, evaluation: Evaluation) -> None:
    result = evaluation.result
    again = score(evaluation.hypotheses, evaluation.references, tokenizer="char")
    assert (result["bleu"], result["chrf"]) == (again.bleu, again.chrf)
    assert (result["step"], result["decode"]["beam_size"]) == (8, 1)
    assert len(evaluation.sentences) == len(evaluation.references) == 40
    nll = sum(sentence.nll for sentence in evaluation.sentences)
    tokens = sum(sentence.target_tokens for sentence in evaluation.sentences)
    assert result["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-9)
    assert evaluation.hypotheses[:40] == run.translate(evaluation.sources[:40], **GREEDY)


@pytest.fixture
def files(evaluation: Evaluation, tmp_path: Path) -> tuple[Path, Path]:
    """The development set as a plain source file and a compressed target file."""
    source, target = tmp_path / "dev set.en", tmp_path / "dev set.de.gz"
    source.write_text("".join(f"{line}\n" for line in evaluation.sources), "utf-8")
    lines = "".join(f"{line}\n" for line in evaluation.references)
    target.write_bytes(gzip.compress(lines.encode()))
    return source, target


def test_text_in_files_gets_the_scores_of_the_same_lines_in_a_split(
    run: Run, evaluation: Evaluation, files: tuple[Path, Path]
) -> None:
    result = evaluate(run, files, GREEDY).result
    own = {key: result.pop(key) for key in ("split", "title")}
    assert own["title"] == "dev set.en and dev set.de.gz"
    assert re.fullmatch(r"on-dev_set\.en-[0-9a-f]{8}", own["split"])
    assert result == {key: evaluation.result[key] for key in result}


@pytest.mark.parametrize(
    "name", ["dev (1).en", "dev copy.en", "dev (copy)", "dev.sync-conflict-1.en", "a\nb\\.en"]
)
def test_an_evaluation_of_any_file_is_listed(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("one\n")
    (tmp_path / "target").write_text("eins\n")
    text = read_files(run, (tmp_path / name, tmp_path / "target"))
    folder = tmp_path / "run" / "evaluations" / f"{text.name}-step8-average1-beam4-alpha0.6"
    folder.mkdir(parents=True)
    (folder / "scores.json").touch()
    assert re.fullmatch(r"on-[\w.]+-[0-9a-f]{8}", text.name)
    assert evaluation_folders(tmp_path / "run") == [folder]


def test_a_reference_beyond_the_learned_positions_is_rejected(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("one\ntwo\n")
    target.write_text("eins\n" + "zwei " * 100 + "\n")
    config = run.config.change(model={"positions": "learned", "max_positions": 24})
    params = abstract_params(build_transformer(config.model, **run.vocabulary.sizes))
    folder = dataclasses.replace(run.folder, config=config)
    learned = dataclasses.replace(run, folder=folder, params=params)
    with pytest.raises(
        DataError, match=r"^target, line 2: \d+ tokens, but the model writes at most"
    ):
        read_files(learned, (source, target))


def test_files_with_markup_or_the_same_text_are_noted(run: Run, tmp_path: Path) -> None:
    markup = tmp_path / "test.sgm"
    markup.write_text('<seg id="1">one</seg>\n', "utf-8")
    with pytest.warns(Note) as notes:
        read_files(run, (markup, markup))
    assert [str(note.message).partition(":")[0] for note in notes] == [
        "test.sgm and test.sgm are the same in 1 of the first 1 lines",
        *["test.sgm contains markup, which is read as text"] * 2,
    ]


def test_changed_text_is_rejected(run: Run) -> None:
    other = dataclasses.replace(run.folder, fingerprint="0" * 64)
    with pytest.raises(DataError, match=r"run: .* is not the text that the run was created with"):
        evaluate(dataclasses.replace(run, folder=other), "dev", {})


@pytest.mark.slow
def test_single_checkpoints_are_scored_next_to_their_mean(run: Run, evaluation: Evaluation) -> None:
    mean = load(run.folder.path, average_checkpoints=2)
    assert mean.steps == (4, 8)
    of_mean = evaluate(mean, "dev", GREEDY, per_checkpoint=True)
    singles = of_mean.result["per_checkpoint"]
    assert [single["step"] for single in singles] == [4, 8]
    assert {key: evaluation.result[key] for key in singles[1]} == singles[1]
    assert of_mean.per_checkpoint[1] == evaluation
    batches = scoring_batches(*prepare_text(run.config.data, run.vocabulary).tokens("dev"))
    params = read_params(run.folder, [4])
    assert singles[0]["perplexity"] == perplexity(score_sentences(run.model, params, batches))
    assert len({of_mean.result["perplexity"], *(s["perplexity"] for s in singles)}) == 3


REFERENCES = [target for _, target in read_pairs("train")][:12]
HYPOTHESES = [line[: -(i % 3)] if i % 3 else line for i, line in enumerate(REFERENCES)]
LENGTHS = [1, 10, 11, 20, 21, 35, 35, 60, 61, 70, 500, 9]
SENTENCES = [SentenceScore(length, 5 + i, 0.7 * i) for i, length in enumerate(LENGTHS)]


def test_each_bucket_has_the_scores_of_its_sentences_alone() -> None:
    buckets = score_by_length(HYPOTHESES, REFERENCES, SENTENCES, "char")
    members = {1: [0, 1, 11], 11: [2, 3], 21: [4], 31: [5, 6], 51: [7], 61: [8, 9, 10]}
    assert [bucket["first"] for bucket in buckets] == list(members)
    assert [bucket["last"] for bucket in buckets] == [10, 20, 30, 40, 60, None]
    for bucket, indices in zip(buckets, members.values(), strict=True):
        lines = ([lines[i] for i in indices] for lines in (HYPOTHESES, REFERENCES))
        hypotheses, references = lines
        bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char")
        assert bucket["bleu"] == bleu.score
        assert bucket["perplexity"] == perplexity([SENTENCES[i] for i in indices])
        assert bucket["sentences"] == len(indices)
    assert len({bucket["bleu"] for bucket in buckets}) > 3


def test_numbers_are_counted_by_their_digits() -> None:
    lines = {
        "zero": ("null", "null"),
        "seven": ("sieben", "siebzig"),
        "nine hundred and ninety-nine": ("neunhundertneunundneunzig", "neunhundert"),
        # Each number in a line is compared with the number at the same position.
        "six; eleven; one hundred thousand": ("sechs; elf; hunderttausend", "sechs; zehn; elf"),
        "five; twelve": ("fünf; zwölf", "fünf"),
    }
    references, hypotheses = zip(*lines.values(), strict=True)
    assert score_by_digits([*lines], hypotheses, references) == [
        {"digits": 1, "numbers": 4, "right": 3},
        {"digits": 2, "numbers": 2, "right": 0},
        {"digits": 3, "numbers": 1, "right": 0},
        {"digits": 6, "numbers": 1, "right": 0},
    ]
    assert score_by_digits([*lines], references, references) == [
        {"digits": digits, "numbers": count, "right": count}
        for digits, count in ((1, 4), (2, 2), (3, 1), (6, 1))
    ]
