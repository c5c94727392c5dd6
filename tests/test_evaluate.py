import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from rich.console import Console
from small import SMALL

from transformer_jax.cli import main
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import DataError
from transformer_jax.inference.evaluate import evaluate, keep, perplexity, score
from transformer_jax.inference.run import Run, load
from transformer_jax.training.loop import run_training, start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    quiet = Console(quiet=True)
    run_training(start(SMALL, path, quiet), quiet)
    return load(path)


def test_perplexity_is_that_of_each_sentence_by_itself(run: Run) -> None:
    source, target = prepare(run.config.data, run.vocabulary).pieces("dev")
    model: Any = jax.jit(lambda s, t: run.model.apply({"params": run.params}, s, t))
    total, count = 0.0, 0
    for i in range(20):
        s, t = (side.padded(np.array([i]), 1, 40) for side in (source, target))
        logits = np.asarray(model(s, t), np.float64)[0]
        for place, piece in enumerate(t[0][: target.lengths[i]]):
            total -= logits[place, piece] - np.log(np.exp(logits[place]).sum())
            count += 1
    few = (type(side)(side.flat, side.offsets[:21]) for side in (source, target))
    np.testing.assert_allclose(
        perplexity(run.model, run.params, *few), math.exp(total / count), rtol=1e-5
    )


def test_scores_are_those_of_sacrebleu() -> None:
    hypotheses, references = ["the cat sat", "a dog ran off"], ["the cat sat", "a dog ran away"]
    scores = score(hypotheses, references)
    assert scores.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert scores.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert scores.exact == 0.5
    assert "tok:13a" in scores.bleu_signature
    assert "tok:char" in score(hypotheses, references, tokenizer="char").bleu_signature


@pytest.mark.parametrize(
    ("hypotheses", "references"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), ([], [])]
)
def test_sets_of_unlike_size_have_no_score(hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(DataError, match="cannot be scored"):
        score(hypotheses, references)


def test_an_evaluation_keeps_lines_and_scores(run: Run) -> None:
    evaluation = evaluate(run, "dev", {"beam_size": 1})
    result, folder = evaluation.result, keep(run, evaluation)
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
    assert main(["evaluate", path, "--set", "dev", "--beam-size", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["evaluate", path, "--set", "dev", "--beam-size", "1", "--average", "2"]) == 0
    shown = capsys.readouterr().out
    assert result["bleu_signature"] in shown
    assert shown.count("->") == 3
    assert "next: " in shown
    kept = {folder.name for folder in (run.folder.path / "evaluations").iterdir()}
    assert {"dev-step8-average1-beam1", "dev-step8-average2-beam1"} <= kept


def test_scores_are_printed_where_they_cannot_be_kept(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    # Whoever runs the tests may write into any folder, but not into a file.
    (copy / "evaluations").touch()
    assert main(["evaluate", str(copy), "--set", "dev", "--beam-size", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["sentences"] == 500
    assert "note: the scores could not be kept" in told.err


def test_evaluation_on_other_text_is_refused(run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy"))
    description = json.loads((copy / "run.json").read_text())
    description["config"]["data"]["num_pairs"] = 201
    (copy / "run.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="not the one"):
        evaluate(load(copy), "dev", {})
