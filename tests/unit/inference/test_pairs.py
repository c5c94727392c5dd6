"""Test the scores of given translations, in Python and on the command line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL, read_pairs, with_architecture
from oracles import apply, floats, transformer
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.data.batches import Ragged
from transformer_jax.errors import DataError, UsageError
from transformer_jax.evaluation.perplexity import perplexity, score_sentences, scoring_batches
from transformer_jax.inference.pairs import encode_pairs
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.progress import Note


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(8,), scale=2.0).path)


@pytest.fixture(scope="module")
def lines() -> tuple[list[str], list[str]]:
    """Lines of different lengths, some of them blank."""
    sources, targets = (list(side) for side in zip(*read_pairs("dev"), strict=True))
    return [*sources[:9], "", sources[9]], [*targets[:9], targets[9], ""]


def test_the_score_of_each_token_equals_that_of_the_formulas(
    run: Run, lines: tuple[list[str], list[str]]
) -> None:
    scores = run.score(*lines)
    sides = (t.encode(x) for t, x in zip(run.vocabulary, lines, strict=True))
    for score, source, target in zip(scores, *sides, strict=True):
        logits = transformer(run.params, np.array([source]), np.array([target]))[0]
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = log_probs[np.arange(len(target)), target]
        np.testing.assert_allclose(score.log_probs, expected, rtol=1e-4, atol=1e-5)
        assert score.log_prob == pytest.approx(expected.sum(), rel=1e-5)
        assert score.tokens == tuple(run.vocabulary.target.to_texts(target))
        assert score.tokens[-1] == "<EOS>"


def test_scores_give_the_perplexity_of_an_evaluation(
    run: Run, lines: tuple[list[str], list[str]]
) -> None:
    scores = run.score(*lines)
    sides = (Ragged.from_lists(t.encode(x)) for t, x in zip(run.vocabulary, lines, strict=True))
    expected = perplexity(score_sentences(run.model, run.params, scoring_batches(*sides)))
    total, tokens = sum(x.log_prob for x in scores), sum(len(x.tokens) for x in scores)
    assert math.exp(-total / tokens) == pytest.approx(expected, rel=1e-5)


def test_a_score_does_not_depend_on_the_other_lines(
    run: Run, lines: tuple[list[str], list[str]]
) -> None:
    together = run.score(*lines)
    for i in (0, 8, 9):
        [alone] = run.score([lines[0][i]], [lines[1][i]])
        np.testing.assert_array_equal(alone.log_probs, together[i].log_probs)
    assert run.score([], []) == []


@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_other_architectures_score_translations_as_without_padding(
    architecture: str, tmp_path: Path
) -> None:
    config = with_architecture(architecture)
    run = load(write_untrained_run(tmp_path / "run", config, steps=(8,), scale=2.0).path)
    pair = "twenty-one", "einundzwanzig"
    source, target = (t.encode([x])[0] for t, x in zip(run.vocabulary, pair, strict=True))
    logits = floats(apply(run.model, run.params, np.array([source]), np.array([target])))[0]
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    [score] = run.score([pair[0]], [pair[1]])
    expected = log_probs[np.arange(len(target)), target]
    np.testing.assert_allclose(score.log_probs, expected, rtol=1e-4, atol=1e-5)


def test_lines_that_cannot_be_scored_are_reported_by_side_and_number(run: Run) -> None:
    with pytest.raises(UsageError, match="sources must be a list of strings, got 'one'"):
        run.score("one", "eins")
    with pytest.raises(UsageError, match="numbers of sources and targets differ: 2 and 1"):
        run.score(["one", "two"], ["eins"])
    with pytest.raises(DataError, match="target 2 is not UTF-8"):
        run.score(["one", "two"], ["eins", "\ud800"])
    with pytest.raises(DataError, match=r"the sources, line 2: \d+ tokens, but the model reads at"):
        run.score(["one", "one " * 80], ["eins", "zwei"])


def test_a_model_with_learned_positions_limits_the_targets(tmp_path: Path) -> None:
    config = SMALL.change(model={"positions": "learned", "max_positions": 40})
    run = load(write_untrained_run(tmp_path / "run", config, steps=(8,)).path)
    with pytest.raises(DataError, match=r"the targets, line 1: .* the model writes at most 40"):
        encode_pairs(run.model, run.vocabulary, ["one"], ["ein " * 60])


def test_the_command_prints_scores_as_a_table_or_as_json(
    run: Run, lines: tuple[list[str], list[str]], capfd: Any, tmp_path: Path
) -> None:
    for name, side in zip(("source", "target"), lines, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in side), "utf-8")
    files = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    expected = run.score(*lines)
    assert main(["score", str(run.folder.path), *files]) == 0
    out, err = capfd.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert [int(number) for number, *_ in rows] == list(range(1, len(expected) + 1))
    assert [float(row[1]) for row in rows] == pytest.approx(
        [x.log_prob for x in expected], abs=1e-4
    )
    assert [int(row[2]) for row in rows] == [len(x.tokens) for x in expected]
    assert err.startswith("perplexity ")
    assert main(["score", str(run.folder.path), *files, "--json"]) == 0
    objects = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for value, score in zip(objects, expected, strict=True):
        assert tuple(value["tokens"]) == score.tokens
        assert value["log_probs"] == floats(score.log_probs).tolist()
    assert main(["score", str(run.folder.path), "--source", files[1], "--target", files[1]]) == 0
    assert "source and source are the same in " in capfd.readouterr().err
    assert main(["score", str(run.folder.path)]) == 2
    assert "score needs two files: --source FILE --target FILE" in capfd.readouterr().err


def test_open_files_and_iterators_are_read_as_lists_of_lines(
    run: Run, lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes("\r\n".join([*lines[0], ""]).encode())
    (tmp_path / "target").write_bytes("\n".join([*lines[1], ""]).encode())
    with (tmp_path / "source").open(newline="") as source, (tmp_path / "target").open() as target:
        scores = run.score(source, target)
    expected = run.score(*lines)
    assert [score.log_prob for score in scores] == [score.log_prob for score in expected]
    assert run.translate(iter(lines[0])) == run.translate(lines[0])
    assert run.translate([f"{line}\n" for line in lines[0]]) == run.translate(lines[0])
    assert run.align(*map(iter, lines)) == run.align(*lines)


def test_unknown_tokens_in_scored_text_are_mentioned(run: Run) -> None:
    with pytest.warns(Note, match="the target"):
        run.score(["one"], ["日本"])
