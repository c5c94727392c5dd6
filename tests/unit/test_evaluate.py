import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from rich.console import Console
from small import SMALL

from transformer_jax.cli import main
from transformer_jax.data.prepare import Prepared, find_prepared, prepare
from transformer_jax.errors import DataError, StorageError
from transformer_jax.inference.evaluate import Evaluation, evaluate, save_evaluation, score
from transformer_jax.inference.perplexity import SentenceScore, perplexity, score_sentences
from transformer_jax.inference.significance import compare, save_comparison
from transformer_jax.inference.trained_run import Run, load, read_params
from transformer_jax.inference.translate import Translator
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    quiet = Console(quiet=True)
    run_training(create_run(SMALL, path, quiet), quiet)
    return load(path)


def test_perplexity_is_that_of_each_sentence_by_itself(run: Run) -> None:
    source, target = prepare(run.config.data, run.vocabulary).tokens("dev")
    model: Any = jax.jit(lambda s, t: run.model.apply({"params": run.params}, s, t))
    total, count = 0.0, 0
    for i in range(20):
        s, t = (side.pad(np.array([i]), 1, 40) for side in (source, target))
        logits = np.asarray(model(s, t), np.float64)[0]
        for place, piece in enumerate(t[0][: target.lengths[i]]):
            total -= logits[place, piece] - np.log(np.exp(logits[place]).sum())
            count += 1
    few = (type(side)(side.flat, side.offsets[:21]) for side in (source, target))
    np.testing.assert_allclose(
        perplexity(score_sentences(run.model, run.params, *few)), math.exp(total / count), rtol=1e-5
    )


def test_each_line_of_an_evaluation_has_its_own_loss(run: Run) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    with (save_evaluation(run, evaluation) / "sentences.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["source_pieces", "target_pieces", "nll"]
    assert [SentenceScore(int(s), int(t), float(nll)) for s, t, nll in rows] == evaluation.sentences
    assert len({row.target_tokens for row in evaluation.sentences}) > 10
    vocabulary = run.vocabulary
    for place in range(0, 500, 100):
        [source] = vocabulary.source.encode([evaluation.sources[place]])
        [target] = vocabulary.target.encode([evaluation.references[place]])
        logits: Any = run.model.apply(
            {"params": run.params}, jax.numpy.asarray([source]), jax.numpy.asarray([target])
        )
        log_probs = jax.nn.log_softmax(logits[0])
        expected = -sum(float(log_probs[i, piece]) for i, piece in enumerate(target))
        found = evaluation.sentences[place]
        assert found[:2] == (len(source), len(target))
        assert found.nll == pytest.approx(expected, rel=1e-5)
    nll, pieces = (sum(column) for column in list(zip(*evaluation.sentences, strict=True))[:0:-1])
    assert evaluation.result["perplexity"] == pytest.approx(math.exp(nll / pieces), rel=1e-9)


def test_scores_are_those_of_sacrebleu() -> None:
    hypotheses, references = ["the cat sat", "a dog ran off"], ["the cat sat", "a dog ran away"]
    scores = score(hypotheses, references)
    assert scores.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert scores.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert scores.exact == 0.5
    assert "tok:13a" in scores.bleu_signature
    bleu = sacrebleu.corpus_bleu(hypotheses, [references])
    assert (scores.precisions, scores.brevity_penalty) == (bleu.precisions, bleu.bp)
    assert scores.lengths == [bleu.sys_len, bleu.ref_len]
    assert "tok:char" in score(hypotheses, references, tokenizer="char").bleu_signature


@pytest.mark.parametrize(
    ("hypotheses", "references"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), ([], [])]
)
def test_sets_of_unlike_size_have_no_score(hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(DataError, match="cannot be scored"):
        score(hypotheses, references)


@pytest.mark.parametrize(
    ("hypotheses", "references", "missing"),
    [([None, "a"], ["a", "b"], "translation 1"), (["a", "b"], ["a", None], "reference 2")],
)
def test_a_missing_line_has_no_score(
    hypotheses: list[str | None], references: list[str | None], missing: str
) -> None:
    with pytest.raises(DataError, match=f"{missing} is missing") as caught:
        score(hypotheses, references)
    assert caught.value.exit_code == 65


def test_an_evaluation_keeps_lines_and_scores(run: Run) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    result, folder = evaluation.result, save_evaluation(run, evaluation)
    lines = {
        name: (folder / f"{name}.txt").read_text("utf-8").splitlines()
        for name in ("source", "hypothesis", "reference")
    }
    assert {len(text) for text in lines.values()} == {500}
    assert json.loads((folder / "scores.json").read_text()) == result
    again = score(lines["hypothesis"], lines["reference"], tokenizer="char")
    assert (result["bleu"], result["chrf"]) == (again.bleu, again.chrf)
    assert result["decode"]["beam_size"] == 1
    assert result["step"] == 8


def test_the_command_line_prints_scores_for_people_and_for_programs(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run.folder.path)
    assert main(["evaluate", path, "--split", "dev", "--beam", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        main(["evaluate", path, "--split", "dev", "--beam-size", "1", "--average-checkpoints", "2"])
        == 0
    )
    shown = capsys.readouterr().out
    assert result["bleu_signature"] in shown
    assert shown.count("->") == 3
    assert "next: " in shown
    kept = {folder.name for folder in (run.folder.path / "evaluations").iterdir()}
    assert {"dev-step8-average1-beam1-alpha0.6", "dev-step8-average2-beam1-alpha0.6"} <= kept


def test_scores_are_printed_where_they_cannot_be_kept(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    # Whoever runs the tests may write into any folder, but not into a file.
    (copy / "evaluations").touch()
    assert main(["evaluate", str(copy), "--split", "dev", "--beam-size", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["sentences"] == 500
    assert "note: the scores could not be kept" in told.err


def test_evaluation_on_other_text_is_refused(run: Run) -> None:
    other = dataclasses.replace(run.folder, fingerprint="0" * 64)
    with pytest.raises(DataError, match=r"run: .* is not the text that the run began with"):
        evaluate(dataclasses.replace(run, folder=other), "dev", {})


def test_a_run_whose_description_names_other_text_is_refused(run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    description = json.loads((copy / "run.json").read_text())
    description["data"]["fingerprint"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(description))
    with pytest.raises(StorageError, match=r"of another run: data '\w+' -> '0{64}'"):
        load(copy)


def test_text_that_is_prepared_anew_shows_how_far_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run.folder.path)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path))
    assert main(["evaluate", path, "--split", "dev", "--beam", "1", "--baseline", path]) == 0
    told = capsys.readouterr().err
    assert told.index("encoding train ...") < told.index("translating dev by run ...")


def test_text_that_is_tokenised_already_is_scored_word_by_word_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Over 100 lines that end in a period by itself, of which sacreBLEU would warn.
    references = [f"this is line {i} ." for i in range(120)]
    hypotheses = [line.replace("is line", "was line") for line in references]
    scores = score(hypotheses, references, tokenizer="none")
    assert "tok:none" in scores.bleu_signature
    assert scores.precisions[0] == pytest.approx(80)
    assert not caplog.records


def test_single_checkpoints_are_scored_beside_their_mean(run: Run) -> None:
    mean = load(run.folder.path, average_checkpoints=2)
    assert mean.steps == (4, 8)
    evaluation = evaluate(mean, "dev", {"beam_size": 1}, per_checkpoint=True)
    singles = evaluation.result["per_checkpoint"]
    assert [single["step"] for single in singles] == [4, 8]
    alone = evaluate(run, "dev", {"beam_size": 1})
    assert {key: alone.result[key] for key in singles[1]} == singles[1]
    pieces = prepare(run.config.data, run.vocabulary).tokens("dev")
    first = read_params(run.folder, run.model, [4])
    assert singles[0]["perplexity"] == perplexity(score_sentences(run.model, first, *pieces))
    assert len({evaluation.result["perplexity"], *(s["perplexity"] for s in singles)}) == 3
    earlier = evaluate(load(run.folder.path, step=4), "dev", {"beam_size": 1})
    assert evaluation.per_checkpoint[0] == earlier


def test_a_checkpoint_that_a_trainer_removes_meanwhile_is_chosen_anew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    chosen: list[list[int]] = []
    choose = CheckpointManager.select_steps

    def train(self: CheckpointManager, average: int = 1, step: int | None = None) -> list[int]:
        chosen.append(choose(self, average, step))
        if chosen[-1] == [8]:
            shutil.rmtree(self.folder / "8")
        return chosen[-1]

    monkeypatch.setattr(CheckpointManager, "select_steps", train)
    assert load(copy, average_checkpoints=1).step == 4
    assert chosen == [[8], [4]]


def test_a_damaged_checkpoint_is_not_read_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    (copy / "checkpoints" / "8" / "checkpoint.json").write_text("{}")
    chosen: list[list[int]] = []
    choose = CheckpointManager.select_steps

    def count(*arguments: Any) -> list[int]:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(CheckpointManager, "select_steps", count)
    with pytest.raises(StorageError, match=r"checkpoint 8 .* is damaged"):
        load(copy, step=8, average_checkpoints=1)
    assert chosen == [[8]]


def test_translations_of_single_checkpoints_are_kept_as_evaluations(
    run: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    mean = load(copy, average_checkpoints=2)
    evaluation = evaluate(mean, "dev", {"beam_size": 1}, per_checkpoint=True)
    home = save_evaluation(mean, evaluation).parent
    assert {folder.name for folder in home.iterdir()} == {
        "dev-step8-average2-beam1-alpha0.6",
        "dev-step4-average1-beam1-alpha0.6",
        "dev-step8-average1-beam1-alpha0.6",
    }
    kept = json.loads((home / "dev-step4-average1-beam1-alpha0.6" / "scores.json").read_text())
    assert kept == evaluation.per_checkpoint[0].result


def test_every_way_to_translate_has_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    copy = load(shutil.copytree(run.folder.path, tmp_path / "copy"))
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    others: list[dict[str, Any]] = [
        {},
        {"length_penalty_alpha": 1.0},
        {"length_penalty": "power"},
        {"max_extra_length": 20},
        {"beam_size": 2},
    ]
    results = [
        {**evaluation.result, "decode": {**evaluation.result["decode"], **other}}
        for other in others
    ]
    folders = {save_evaluation(copy, evaluation._replace(result=result)).name for result in results}
    assert len(folders) == len(others)
    assert "dev-step8-average1-beam1-alpha0.6-length-penalty-power" in folders


def test_runs_of_one_name_are_kept_side_by_side(tmp_path: Path) -> None:
    for lines in (["eins"], ["zwei"], ["eins"]):
        save_comparison(tmp_path, {"run": "seed-0", "lines": lines}, lines)
    kept = sorted(tmp_path.glob("baseline-seed-0-*.json"))
    assert len(kept) == 2
    for path in kept:
        assert json.loads(path.read_text())["lines"] == [path.with_suffix(".txt").read_text()[:-1]]


def test_scores_never_lie_beside_other_translations(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = load(shutil.copytree(run.folder.path, tmp_path / "copy"))
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    folder = save_evaluation(copy, evaluation)
    (folder / "baseline-other.json").touch()
    save_evaluation(copy, evaluation)  # the same lines: nothing is lost
    assert (folder / "baseline-other.json").exists()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("transformer_jax.inference.evaluate.write_json", fail)
    with pytest.raises(StorageError, match="no space left"):
        save_evaluation(copy, spoilt(evaluation, 2))
    assert list(folder.glob("*.json")) == []


def test_singles_are_of_a_mean(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["evaluate", str(run.folder.path), "--average-checkpoints", "1", "--per-checkpoint"])
        == 2
    )
    assert "--per-checkpoint is for a mean of checkpoints" in capsys.readouterr().err


def test_a_set_that_the_text_lacks_is_told_with_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_test(*arguments: Any, **options: Any) -> Prepared:
        prepared = find_prepared(*arguments, **options)
        report = {key: value for key, value in prepared.report.items() if key != "test"}
        return prepared._replace(report=report)

    monkeypatch.setattr("transformer_jax.inference.evaluate.find_prepared", without_test)
    path = run.folder.path
    assert main(["evaluate", str(path)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert f"{path} has no test set" in told.err


def spoilt(evaluation: Evaluation, every: int) -> Evaluation:
    """Return the references as translations, but every so many without their first letters."""
    lines = [r[3:] if i % every == 0 else r for i, r in enumerate(evaluation.references)]
    return evaluation._replace(hypotheses=lines)


def test_a_comparison_is_that_of_sacrebleus_own_command(run: Run, tmp_path: Path) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    better, worse = spoilt(evaluation, 9), spoilt(evaluation, 7)
    files = {
        "reference": evaluation.references,
        "worse": worse.hypotheses,
        "better": better.hypotheses,
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    command = "sacrebleu reference -i worse better -m bleu chrf -tok char --paired-bs -f text -w 4"
    told = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    # Its table has "score (mean ± interval)", and under it "(p = ...)", for both scores.
    score_and_interval = re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", told.stdout)
    p_values = re.findall(r"\(p = ([\d.]+)\)", told.stdout)
    bleu, chrf = compare(better, worse, "char")
    ours = [
        (f"{value:.4f}", f"{interval:.4f}")
        for value, interval in (
            (bleu.baseline, bleu.baseline_interval),
            (chrf.baseline, chrf.baseline_interval),
            (bleu.score, bleu.interval),
            (chrf.score, chrf.interval),
        )
    ]
    assert score_and_interval == ours
    assert p_values == [f"{c.p:.4f}" for c in (bleu, chrf)]
    assert bleu.score > bleu.baseline


def test_only_a_difference_that_is_large_enough_is_significant(run: Run) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    good, bad = spoilt(evaluation, 50), spoilt(evaluation, 3)
    assert all(c.p > 0.9 for c in compare(good, good, "char"))
    assert all(c.p < 0.01 for c in compare(good, bad, "char"))


def test_a_comparison_repeats_whatever_the_environment_says(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    better, worse = spoilt(evaluation, 9), spoilt(evaluation, 7)
    expected = compare(better, worse, "char")
    for seed in ("none", "0", "7", "seven"):
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        assert compare(better, worse, "char") == expected
        assert os.environ["SACREBLEU_SEED"] == seed


def test_runs_with_other_references_are_not_compared(run: Run) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    sides = {side: getattr(evaluation, side)[:9] for side in Evaluation._fields[1:4]}
    with pytest.raises(DataError, match="one has 500 references in its dev set, the other 9"):
        compare(evaluation, evaluation._replace(**sides), "char")
    other = [*evaluation.references[:3], "nichts", *evaluation.references[4:]]
    with pytest.raises(DataError, match=r"reference 4 of their dev sets .* 'nichts' in the other"):
        compare(evaluation, evaluation._replace(references=other), "char")
    # The same references of other sources are no reason.
    assert compare(evaluation, evaluation._replace(sources=other), "char")[0].p == 1


def test_runs_with_other_references_are_told_before_anything_is_translated(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = iter([(["one"], ["eins"]), (["one"], ["zwei"])])
    monkeypatch.setattr(Prepared, "lines", lambda _self, _split: next(sets))
    monkeypatch.setattr(Translator, "translate", None)
    path = str(run.folder.path)
    assert main(["evaluate", path, "--baseline", path]) == 65
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "reference 1 of their test sets is 'eins' in one, 'zwei' in the other" in told.err


def test_the_command_line_compares_two_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run.folder.path)
    options = [
        "--split",
        "dev",
        "--beam",
        "1",
        "--average-checkpoints",
        "2",
        "--per-checkpoint",
        "--baseline",
        path,
    ]
    assert main(["evaluate", path, *options]) == 0
    shown = capsys.readouterr().out
    assert "paired" in shown
    assert "mean of 2 checkpoints" in shown
    assert main(["evaluate", path, *options, "--json"]) == 0
    against = json.loads(capsys.readouterr().out)["baseline"]
    assert against["run"] == "run"
    folder = run.folder.path / "evaluations" / "dev-step8-average2-beam1-alpha0.6"
    # Twice the same lines: one comparison.
    [kept] = folder.glob("baseline-run-*.json")
    assert json.loads(kept.read_text()) == against
    lines = kept.with_suffix(".txt").read_text("utf-8").split("\n")[:-1]
    references = (folder / "reference.txt").read_text("utf-8").split("\n")[:-1]
    scores = score(lines, references, tokenizer="char")
    assert scores.bleu == against["scores"][0]["baseline"]
    assert scores.bleu_signature == against["bleu_signature"]
    assert f"bs:1000|seed:{against['seed']}" in against["scores"][0]["signature"]
    assert str(run.folder.path.parent) not in json.dumps(against)
    assert "baseline" not in json.loads((folder / "scores.json").read_text())
    assert [c["metric"] for c in against["scores"]] == ["BLEU", "chrF2"]
    assert against["scores"][0]["p"] == 1
    assert main(["evaluate", path, "--baseline", f"{path}-2"]) == 2
    assert "is no run" in capsys.readouterr().err
