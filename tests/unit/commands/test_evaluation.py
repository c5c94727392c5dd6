"""Test the `evaluate` command."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from corpora import write_treebank
from example_configs import NUMBER_WORDS, SMALL
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.config.loading import load_config
from transformer_jax.data.prepare import Prepared
from transformer_jax.evaluation.evaluate import Evaluation, evaluate
from transformer_jax.evaluation.scores import score
from transformer_jax.files import read_json, write_json
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import Translator
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training import create_run

GREEDY = {"beam_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = write_untrained_run(tmp_path_factory.mktemp("runs") / "run", scale=3.0)
    return load(run.path, average_checkpoints=1)


@pytest.fixture(scope="module")
def evaluation(run: Run) -> Evaluation:
    return evaluate(run, "dev", GREEDY)


@pytest.fixture
def files(evaluation: Evaluation, tmp_path: Path) -> tuple[Path, Path]:
    """The development set as a plain source file and a compressed target file."""
    source, target = tmp_path / "dev set.en", tmp_path / "dev set.de.gz"
    source.write_text("".join(f"{line}\n" for line in evaluation.sources), "utf-8")
    lines = "".join(f"{line}\n" for line in evaluation.references)
    target.write_bytes(gzip.compress(lines.encode()))
    return source, target


def test_the_command_line_scores_text_in_files(
    run: Run,
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    description = read_json(copy / "run.json")
    description["config"]["data"]["bleu_tokenizer"] = "13a"
    write_json(copy / "run.json", description)
    on = ["evaluate", str(copy), "--beam", "1", "--on", *map(str, files)]
    assert main([*on, "--baseline", str(copy)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("dev set.en and dev set.de.gz, 40 sentences, step 8")
    assert "compound-split, as in the paper's script" in output
    assert "approximate\nrandomization" in output
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
    assert "have 41 and 40 lines" in error_of(65, *on[2:])
    short = tmp_path / "short"
    short.write_text("one\n" + "one " * 100)
    error = error_of(65, "--on", str(short), str(short))
    assert re.search(r"short, line 2: \d+ tokens, but the model reads at most 64$", error.strip())


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
    assert "randomization" in captured.out
    assert "mean of 2 checkpoints" in captured.out
    assert captured.err.index("encoding train ...") < captured.err.index("translating dev with run")
    assert main(["evaluate", path, *options, "--json"]) == 0
    baseline = json.loads(capsys.readouterr().out)["baseline"]
    assert baseline["run"] == "run"
    assert str(run.folder.path.parent) not in json.dumps(baseline)
    assert [c["metric"] for c in baseline["scores"]] == ["BLEU", "chrF2"]
    assert baseline["scores"][0]["p"] == 1
    assert f"ar:1000|seed:{baseline['seed']}" in baseline["scores"][0]["signature"]
    folder = (
        run.folder.path / "evaluations" / "dev-step8-average2-beam1-alpha0.6-max-extra-length-8"
    )
    # Both comparisons use the same translations, so only one baseline file is saved.
    [saved] = folder.glob("baseline-run-*.json")
    assert read_json(saved) == baseline
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

    prepared = RunFolder.open(Path(path)).find_text()
    report = {key: value for key, value in prepared.report.items() if key != "test"}
    monkeypatch.setattr(RunFolder, "find_text", lambda _: prepared._replace(report=report))
    assert f"{path} has no test set" in error_of(2)


@pytest.mark.slow
def test_evaluate_prints_and_stores_the_scores_of_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parsing = load_config("parsing").data
    data = {
        **NUMBER_WORDS,
        "folder": str(write_treebank(tmp_path / "treebank")),
        "source_vocab_size": 60,
        "max_length": 32,
        **{key: getattr(parsing, key) for key in ("corpus", "task", "vocab_size", "target_tokens")},
    }
    run = write_untrained_run(tmp_path / "run", SMALL.change(data=data))
    command = ["evaluate", str(run.path), "--beam-size", "1", "--average-checkpoints", "2"]
    assert main([*command, "--per-checkpoint"]) == 0
    output = capsys.readouterr().out
    assert "  F1          " in output
    assert "of 8 trees" in output
    [head] = [line.split() for line in output.splitlines() if "step  perplexity" in line]
    assert head == ["step", "perplexity", "BLEU", "chrF2", "f1"]
    [path] = run.path.glob("evaluations/test-step8-average2-*/scores.json")
    result = json.loads(path.read_text())
    assert result["task"]["name"] == "parsing"
    assert f"F1          {result['task']['f1']:.2f}" in output
    assert [single["task"]["sentences"] for single in result["per_checkpoint"]] == [8, 8]


def test_a_bad_reference_is_reported_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("searched"))
    # A run is created only if its development set consists of trees, but its test set may differ.
    with monkeypatch.context() as patch:
        patch.setattr(create_run, "check_task", lambda *_: None)
        run = write_untrained_run(tmp_path / "run", SMALL.change(data={"task": "parsing"}))
    assert main(["evaluate", str(run.path), "--average-checkpoints", "1"]) == 65
    assert "reference 1 is not a linearized tree" in capsys.readouterr().err
