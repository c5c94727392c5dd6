import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from small import NUMBER_WORDS, SMALL
from treebank import write_treebank
from untrained import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.config.loading import load_config
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import DataError
from transformer_jax.inference.parsing import describe_parses, score_parses
from transformer_jax.inference.tasks import main_score, score_task
from transformer_jax.inference.translate import Translator
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.components import RunComponents
from transformer_jax.training.evaluation import DevEvaluator
from transformer_jax.training.metric_writer import MetricWriter

REFERENCE = "(S (NP XX XX )NP (VP XX (NP XX XX )NP )VP . )S"
SENTENCE = "the cat sees a dog ."


def score(*hypotheses: str) -> dict[str, Any]:
    lines = [[line] * len(hypotheses) for line in (SENTENCE, REFERENCE)]
    return score_parses(lines[0], hypotheses, lines[1])


def test_a_correct_tree_scores_100() -> None:
    values = score(REFERENCE)
    assert (values["f1"], values["complete_match"], values["repaired"]) == (100, 100, 0)


def test_a_wrong_tag_for_punctuation_changes_nothing() -> None:
    assert score(REFERENCE.replace(".", "XX"))["f1"] == 100


def test_scores_count_brackets_after_repair() -> None:
    # S and VP are correct. The second NP is missing, and the first NP is one word too short.
    values = score("(S (NP XX )NP XX (VP XX XX XX )VP .")
    assert values["repaired"] == 1
    assert (values["precision"], values["recall"]) == (pytest.approx(200 / 3), 50)
    # Without symbols, there are no brackets. The sentence still counts.
    nothing = score("", REFERENCE)
    assert (nothing["sentences"], nothing["recall"], nothing["precision"]) == (2, 50, 100)


def test_the_baseline_and_short_sentences_are_scored_too() -> None:
    values = score(REFERENCE)
    # S (0-5) and VP (2-5) are correct, but the right-branching VP (1-5) and VP (3-5) are not.
    assert values["right_branching"]["f1"] == pytest.approx(50)
    words = " ".join(["a"] * 41)
    long = score_parses([words], ["(S " + "XX " * 41 + ")S"], ["(S " + "XX " * 41 + ")S"])
    assert (long["sentences"], long["short"]["sentences"]) == (1, 0)


def test_a_reference_that_is_not_a_tree_is_reported() -> None:
    with pytest.raises(DataError, match="reference 2 is not a linearized tree over the 2 words"):
        score_parses(["a", "a b"], ["(S XX )S"] * 2, ["(S XX )S"] * 2)


def test_a_word_can_contain_a_no_break_space() -> None:
    line = "(S XX XX )S"
    assert score_parses(["a\N{NO-BREAK SPACE}b  c"], [line], [line])["f1"] == 100


def test_the_description_has_all_scores() -> None:
    lines = "\n".join(describe_parses(score(REFERENCE, "(S")))
    assert "precision 100.00, recall 62.50" in lines
    assert "right-branching" in lines
    assert "short: at most 40 words" in lines
    assert "repaired    1 of 2 trees" in lines


def test_translation_has_no_score_of_its_own() -> None:
    assert score_task("translation", ["a"], ["b"], ["c"]) is None
    assert main_score(None) == {}
    assert main_score(score_task("parsing", [SENTENCE], [REFERENCE], [REFERENCE])) == {"f1": 100}


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
    run = write_untrained_run(tmp_path / "run", SMALL.change(data={"task": "parsing"}))
    assert main(["evaluate", str(run.path), "--average-checkpoints", "1"]) == 65
    assert "reference 1 is not a linearized tree" in capsys.readouterr().err


def test_a_bad_reference_is_reported_before_training(tmp_path: Path) -> None:
    prepared = prepare(SMALL.data)
    folder = RunFolder(
        tmp_path, SMALL.change(data={"task": "parsing"}), prepared.vocabulary, prepared.fingerprint
    )
    components = Mock(spec=RunComponents, folder=folder, prepared=prepared)
    with pytest.raises(DataError, match="reference 1 is not a linearized tree"):
        DevEvaluator(components, Mock(spec=MetricWriter))
