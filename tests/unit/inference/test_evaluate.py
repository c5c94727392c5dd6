import dataclasses
import gzip
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import sacrebleu
from untrained import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.data.prepare import Prepared, find_prepared, prepare
from transformer_jax.errors import DataError
from transformer_jax.inference import evaluate as evaluate_module
from transformer_jax.inference.evaluate import Evaluation, evaluate, read_files
from transformer_jax.inference.perplexity import perplexity, score_sentences
from transformer_jax.inference.scores import compound_bleu, score
from transformer_jax.inference.trained_run import Run, load, read_params
from transformer_jax.inference.translate import Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params

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
    ],
)
def test_missing_lines_are_an_error(
    hypotheses: list[str], references: list[str], message: str
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
    assert len(evaluation.sentences) == len(evaluation.references) == 40
    nll = sum(sentence.nll for sentence in evaluation.sentences)
    tokens = sum(sentence.target_tokens for sentence in evaluation.sentences)
    assert result["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-9)
    assert evaluation.hypotheses[:40] == run.translate(evaluation.sources[:40], **GREEDY)


def fourth_root(numerator: float, denominator: float) -> float:
    """Return BLEU in percent, given the product of the four n-gram precisions."""
    return 100 * (numerator / denominator) ** 0.25


@pytest.mark.parametrize(
    ("tokenizer", "hypothesis", "reference", "expected"),
    [
        # The n-gram precisions of "a b ##AT##-##AT## c d e" are 5/6, 4/5, 3/4, and 2/3.
        ("none", "a b-c d e", "a b-c d f", fourth_root(1, 3)),
        # The pattern consumes the letters on both sides, so "x-b-c" is split only at its first
        # hyphen.
        ("none", "x-b-c d e f", "y-b-c d e f", fourth_root(1, 3)),
        # A hyphen surrounded by spaces is a word, so the n-gram precisions are 5/6, 4/5, 3/4, and
        # 2/3.
        ("none", "a - b c d e", "a - b c d f", fourth_root(1, 3)),
        # The translation has 4 words instead of 5. Every n-gram matches, and the brevity penalty is
        # exp(1 - 5/4).
        ("none", "a b c d", "a b c d e", 100 * math.exp(-1 / 4)),
        # There is no smoothing, so without a matching 4-gram the score is zero.
        ("none", "a b c x d", "a b c y d", 0.0),
        # The abbreviation and the ordinal keep their periods, so there are 7 words. The word "Juni"
        # is in 1 of 7 unigrams, 2 of 6 bigrams, 2 of 5 trigrams, and 2 of 4 four-grams.
        ("13a", "Sie kam z.B. am 3. Juni.", "Sie kam z.B. am 3. Mai.", fourth_root(72, 420)),
        # Quotation marks become separate words, as in `„ Ja " , rief er .`. In the reference, only
        # the first of these 7 words is different.
        ("13a", "„Ja“, rief er.", "»Ja“, rief er.", fourth_root(6 * 5 * 4 * 3, 7 * 6 * 5 * 4)),
        # Typographic punctuation is replaced before tokenization.
        ("13a", "Er sagt: “So geht es …”", 'Er sagt: "So geht es ..."', 100.0),
        # Tokenization precedes splitting, so the result is
        # "im Text ##AT##-##AT## Format , bitte !".
        ("13a", "im Text-Format, bitte!", "im Text-Format, bitte?", fourth_root(360, 840)),
    ],
)
def test_the_papers_bleu_is_computed_by_hand(
    tokenizer: str, hypothesis: str, reference: str, expected: float
) -> None:
    assert compound_bleu(tokenizer, [hypothesis], [reference]) == pytest.approx(expected)


def test_the_papers_bleu_sums_over_the_corpus() -> None:
    # In total, 4 of 6 unigrams, 2 of 4 bigrams, and 0 of 2 trigrams match, so the score is zero.
    assert compound_bleu("none", ["a b", "c d e f"], ["a b", "c d x y"]) == 0
    # In total, 6 of 7 unigrams, 4 of 5 bigrams, 2 of 3 trigrams, and 1 of 1 four-grams match.
    hypotheses, references = ["a b c d", "e f g"], ["a b c d", "e f h"]
    score = compound_bleu("none", hypotheses, references)
    assert score == pytest.approx(fourth_root(6 * 4 * 2 * 1, 7 * 5 * 3 * 1))


def test_characters_have_no_compounds(evaluation: Evaluation) -> None:
    assert compound_bleu("char", ["a-b"], ["a-b"]) is None
    assert evaluation.result["compound_bleu"] is None


@pytest.fixture
def files(evaluation: Evaluation, tmp_path: Path) -> tuple[Path, Path]:
    """The development set as two files. The target file is compressed."""
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
    assert re.fullmatch(r"on-dev set\.en-[0-9a-f]{8}", own["split"])
    assert result == {key: evaluation.result[key] for key in result}


def test_the_command_line_scores_text_in_files(
    run: Run,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    description = json.loads((copy / "run.json").read_text())
    description["config"]["data"]["bleu_tokenizer"] = "13a"
    (copy / "run.json").write_text(json.dumps(description))
    on = ["evaluate", str(copy), "--beam", "1", "--on", *map(str, files)]
    assert main([*on, "--baseline", str(copy)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("dev set.en and dev set.de.gz, 40 sentences, step 8")
    assert "compound-split, as in the paper's script" in output
    assert "paired bootstrap" in output
    [folder] = (copy / "evaluations").glob("on-*")
    assert folder.name.endswith("-step8-average1-beam1-alpha0.6-max-extra-length-8")
    scores = json.loads((folder / "scores.json").read_text())
    assert isinstance(scores["compound_bleu"], float)

    def error_of(code: int, *options: str) -> str:
        assert main(["evaluate", str(copy), *options]) == code
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        return captured.err

    source, target = map(str, files)
    assert "--on and --split are mutually exclusive" in error_of(2, *on[2:], "--split", "test")
    assert f"there is no file {source}x" in error_of(65, "--on", f"{source}x", target)
    with files[0].open("a") as file:
        file.write("one\n")
    assert "dev set.en has 41 lines" in error_of(65, *on[2:])
    short = tmp_path / "short"
    short.write_text("one\n" + "one " * 100)
    error = error_of(65, "--on", str(short), str(short))
    assert re.search(r"short, line 2: \d+ tokens, and the model reads at most 64$", error.strip())


def test_a_reference_beyond_the_learned_positions_is_rejected(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("one\ntwo\n")
    target.write_text("eins\n" + "zwei " * 100 + "\n")
    config = run.config.change(model={"positions": "learned", "max_positions": 24})
    params = abstract_params(build_transformer(config.model, **run.vocabulary.sizes))
    folder = dataclasses.replace(run.folder, config=config)
    learned = dataclasses.replace(run, folder=folder, params=params)
    with pytest.raises(
        DataError, match=r"^target, line 2: \d+ tokens, and the model writes at most"
    ):
        read_files(learned, (source, target))


@pytest.mark.slow
@pytest.mark.parametrize("beam_end", ["any", "tensor2tensor"])
def test_the_command_line_selects_which_hypotheses_may_end(
    run: Run, beam_end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\n")
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    options = ["--on", str(lines), str(lines), "--beam-end", beam_end, "--json"]
    assert main(["evaluate", str(copy), *options]) == 0
    assert json.loads(capsys.readouterr().out)["decode"]["beam_end"] == beam_end
    [folder] = (copy / "evaluations").glob("on-*")
    assert folder.name.endswith("-beam-end-any") == (beam_end == "any")


def test_changed_text_is_rejected(run: Run) -> None:
    other = dataclasses.replace(run.folder, fingerprint="0" * 64)
    with pytest.raises(DataError, match=r"run: .* is not the text that the run began with"):
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
    tokens = prepare(run.config.data, run.vocabulary).tokens("dev")
    params = read_params(run.folder, [4])
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
    search = "beam1-alpha0.6-max-extra-length-8"
    assert {f"dev-step8-average1-{search}", f"dev-step8-average2-{search}"} <= names


def test_scores_are_printed_even_if_they_cannot_be_saved(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    # Root can write to a read-only directory, so replace the directory with a file.
    (copy / "evaluations").touch()
    assert main(["evaluate", str(copy), "--split", "dev", "--beam-size", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["sentences"] == 40
    assert "note: the scores could not be saved" in captured.err


@pytest.mark.slow
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
    folder = (
        run.folder.path / "evaluations" / "dev-step8-average2-beam1-alpha0.6-max-extra-length-8"
    )
    # Both comparisons use the same translations, so there is only one file.
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
