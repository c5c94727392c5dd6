import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import sacrebleu
from untrained import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.data.prepare import Prepared, find_prepared, prepare
from transformer_jax.errors import DataError
from transformer_jax.inference import evaluate as evaluate_module
from transformer_jax.inference.evaluate import Evaluation, evaluate, score
from transformer_jax.inference.perplexity import perplexity, score_sentences
from transformer_jax.inference.trained_run import Run, load, read_params
from transformer_jax.inference.translate import Translator

GREEDY = {"beam_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = write_untrained_run(tmp_path_factory.mktemp("runs") / "run", scale=3.0)
    return load(run.path, average_checkpoints=1)


@pytest.fixture(scope="module")
def evaluation(run: Run) -> Evaluation:
    return evaluate(run, "dev", GREEDY)


def test_scores_are_those_of_sacrebleu() -> None:
    hypotheses, references = ["the cat sat", "a dog ran off"], ["the cat sat", "a dog ran away"]
    scores = score(hypotheses, references)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references])
    assert scores.bleu == bleu.score
    assert scores.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert scores.exact == 0.5
    assert "tok:13a" in scores.bleu_signature
    assert (scores.precisions, scores.brevity_penalty) == (bleu.precisions, bleu.bp)
    assert scores.lengths == [bleu.sys_len, bleu.ref_len]
    assert "tok:char" in score(hypotheses, references, tokenizer="char").bleu_signature


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"], ["a", "b"], "cannot score 1 translations with 2 references"),
        (["a", "b"], ["a"], "cannot score 2 translations with 1 references"),
        ([], [], "cannot score 0 translations"),
        ([None, "a"], ["a", "b"], "translation 1 is missing"),
        (["a", "b"], ["a", None], "reference 2 is missing"),
    ],
)
def test_missing_lines_are_an_error(
    hypotheses: list[str | None], references: list[str | None], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        score(hypotheses, references)
    assert caught.value.exit_code == 65


def test_tokenized_text_is_scored_word_by_word_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # sacreBLEU warns if more than 100 lines end in a tokenized period.
    references = [f"this is line {i} ." for i in range(120)]
    hypotheses = [line.replace("is line", "was line") for line in references]
    scores = score(hypotheses, references, tokenizer="none")
    assert "tok:none" in scores.bleu_signature
    assert scores.precisions[0] == pytest.approx(80)
    assert not caplog.records


def test_an_evaluation_describes_its_scores(run: Run, evaluation: Evaluation) -> None:
    result = evaluation.result
    again = score(evaluation.hypotheses, evaluation.references, tokenizer="char")
    assert (result["bleu"], result["chrf"]) == (again.bleu, again.chrf)
    assert (result["step"], result["decode"]["beam_size"]) == (8, 1)
    assert len(evaluation.sentences) == len(evaluation.references) == 500
    nll = sum(sentence.nll for sentence in evaluation.sentences)
    tokens = sum(sentence.target_tokens for sentence in evaluation.sentences)
    assert result["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-9)
    assert evaluation.hypotheses[:40] == run.translate(evaluation.sources[:40], **GREEDY)


def test_changed_text_is_rejected(run: Run) -> None:
    other = dataclasses.replace(run.folder, fingerprint="0" * 64)
    with pytest.raises(DataError, match=r"run: .* is not the text that the run began with"):
        evaluate(dataclasses.replace(run, folder=other), "dev", {})


def test_single_checkpoints_are_scored_next_to_their_mean(run: Run, evaluation: Evaluation) -> None:
    mean = load(run.folder.path, average_checkpoints=2)
    assert mean.steps == (4, 8)
    of_mean = evaluate(mean, "dev", GREEDY, per_checkpoint=True)
    singles = of_mean.result["per_checkpoint"]
    assert [single["step"] for single in singles] == [4, 8]
    assert {key: evaluation.result[key] for key in singles[1]} == singles[1]
    assert of_mean.per_checkpoint[1] == evaluation
    tokens = prepare(run.config.data, run.vocabulary).tokens("dev")
    params = read_params(run.folder, run.model, [4])
    assert singles[0]["perplexity"] == perplexity(score_sentences(run.model, params, *tokens))
    assert len({of_mean.result["perplexity"], *(s["perplexity"] for s in singles)}) == 3


def test_the_command_line_prints_scores_for_people_and_for_programs(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run.folder.path)
    options = ["--split", "dev", "--beam-size", "1"]
    assert main(["evaluate", path, *options, "--average-checkpoints", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["evaluate", path, *options, "--average-checkpoints", "2"]) == 0
    output = capsys.readouterr().out
    assert result["bleu_signature"] in output
    assert output.count("->") == 3
    assert "next: " in output
    names = {folder.name for folder in (run.folder.path / "evaluations").iterdir()}
    assert {"dev-step8-average1-beam1-alpha0.6", "dev-step8-average2-beam1-alpha0.6"} <= names


def test_scores_are_printed_even_if_they_cannot_be_saved(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    # A read-only directory would not stop root, so replace the directory by a file.
    (copy / "evaluations").touch()
    assert main(["evaluate", str(copy), "--split", "dev", "--beam-size", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["sentences"] == 500
    assert "note: the scores could not be saved" in captured.err


def test_the_command_line_compares_two_runs(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The cache is empty, so the command prepares the text again and shows its progress.
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path))
    path = str(run.folder.path)
    options = ["--split", "dev", "--beam-size", "1", "--average-checkpoints", "2"]
    options += ["--baseline", path]
    assert main(["evaluate", path, *options, "--per-checkpoint"]) == 0
    captured = capsys.readouterr()
    assert "paired" in captured.out
    assert "mean of 2 checkpoints" in captured.out
    assert captured.err.index("encoding train ...") < captured.err.index("translating dev with run")
    assert main(["evaluate", path, *options, "--json"]) == 0
    baseline = json.loads(capsys.readouterr().out)["baseline"]
    assert baseline["run"] == "run"
    assert str(run.folder.path.parent) not in json.dumps(baseline)
    assert [c["metric"] for c in baseline["scores"]] == ["BLEU", "chrF2"]
    assert baseline["scores"][0]["p"] == 1
    assert f"bs:1000|seed:{baseline['seed']}" in baseline["scores"][0]["signature"]
    folder = run.folder.path / "evaluations" / "dev-step8-average2-beam1-alpha0.6"
    # Both comparisons had the same translations, so there is only one file.
    [saved] = folder.glob("baseline-run-*.json")
    assert json.loads(saved.read_text()) == baseline
    lines = saved.with_suffix(".txt").read_text("utf-8").split("\n")[:-1]
    references = (folder / "reference.txt").read_text("utf-8").split("\n")[:-1]
    scores = score(lines, references, tokenizer="char")
    assert scores.bleu == baseline["scores"][0]["baseline"]
    assert scores.bleu_signature == baseline["bleu_signature"]
    assert "baseline" not in json.loads((folder / "scores.json").read_text())


def test_mistakes_are_reported_before_anything_is_translated(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Translator, "translate", None)
    path = str(run.folder.path)

    def error_of(code: int, *options: str) -> str:
        assert main(["evaluate", path, *options]) == code
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        return captured.err

    assert "--per-checkpoint" in error_of(2, "--average-checkpoints", "1", "--per-checkpoint")
    assert "is not a run" in error_of(2, "--baseline", f"{path}-2")
    with monkeypatch.context() as patch:
        lines = iter([(["one"], ["eins"]), (["one"], ["zwei"])])
        patch.setattr(Prepared, "lines", lambda _self, _split: next(lines))
        message = "reference 1 of their test sets is 'eins' in one, 'zwei' in the other"
        assert message in error_of(65, "--baseline", path)

    def prepare_without_test(*arguments: object, **options: object) -> Prepared:
        prepared = find_prepared(*arguments, **options)  # pyrefly: ignore[bad-argument-type]
        report = {key: value for key, value in prepared.report.items() if key != "test"}
        return prepared._replace(report=report)

    monkeypatch.setattr(evaluate_module, "find_prepared", prepare_without_test)
    assert f"{path} has no test set" in error_of(2)
