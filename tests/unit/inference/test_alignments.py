"""Test word alignments and their error rate."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL, read_pairs, with_architecture
from run_files import write_untrained_run

import transformer_jax as tj
from transformer_jax.cli import main
from transformer_jax.errors import DataError, UsageError
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.progress import Note


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"num_layers": 2})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=3.0).path)


SOURCES = [source for source, _ in read_pairs("dev")[:4]]
TARGETS = ["fünf und zwanzig", "eins  zwei", "ein hundert vier tausend", "acht"]


def align_words(run: Run, index: int, weights: Any) -> set[tuple[int, int]]:
    """Align the words of a pair, given its weights [T, S], with loops over words and tokens."""
    source, target = (
        tokenizer.split(lines[index])
        for tokenizer, lines in zip(run.vocabulary, (SOURCES, TARGETS), strict=True)
    )
    links: set[tuple[int, int]] = set()
    target_word = -1
    for t, token in enumerate(target):
        target_word += token.startswith("▁")
        best = max(range(len(source)), key=lambda s: weights[t, s])
        links.add((sum(x.startswith("▁") for x in source[: best + 1]) - 1, target_word))
    return links


def test_words_are_aligned_where_the_weights_are_largest(run: Run) -> None:
    options: list[dict[str, Any]] = [{}, {"layer": -1, "heads": [1]}, {"layer": 0, "heads": [0]}]
    for chosen in options:
        lines = run.align(SOURCES, TARGETS, **chosen)
        for i, line in enumerate(lines):
            cross = run.attention(SOURCES[i], TARGETS[i]).cross
            # By default, the weights are the mean over the heads of the penultimate layer.
            heads = cross[chosen.get("layer", -2)][chosen.get("heads", [0, 1])]
            expected = align_words(run, i, heads.mean(axis=0))
            assert line == " ".join(f"{s}-{t}" for s, t in sorted(expected))
    assert run.align(["", SOURCES[0]], [TARGETS[0], ""]) == ["", ""]


def test_words_that_normalization_splits_are_noted(tmp_path: Path) -> None:
    config = SMALL.change(data={"normalization": "spaces"})
    run = load(write_untrained_run(tmp_path / "run", config, steps=(8,)).path)
    with pytest.warns(Note, match="word count changes with normalization .*: 1$"):
        run.align(["one\u00a0hundred", "one hundred"], ["ein hundert"] * 2)


def test_the_error_rate_is_that_of_och_and_ney() -> None:
    # One of three links is sure, and another one is possible. There are two sure gold links.
    assert tj.alignment_error_rate(["0-0 1-2 2-1"], ["0-0 1-1 2?1"]) == pytest.approx(1 - 3 / 5)
    # A sure link is also possible. The rate is computed over all lines together.
    lines, gold = ["0-0", "", "0-1 3-1"], ["0-0", "1-1", "0p1 3-1"]
    assert tj.alignment_error_rate(lines, gold) == pytest.approx(1 - (2 + 3) / (3 + 3))
    assert tj.alignment_error_rate(lines, lines) == 0
    with pytest.raises(UsageError, match="alignments and gold alignments differ: 1 and 2"):
        tj.alignment_error_rate(["0-0"], ["0-0", "0-0"])
    with pytest.raises(DataError, match="alignment 2: '0:0' is not a link such as 0-0"):
        tj.alignment_error_rate(["0-0", "0-0"], ["0-0", "0:0"])
    with pytest.raises(DataError, match="neither the alignments nor the gold"):
        tj.alignment_error_rate([""], ["0?0"])


def test_alignments_and_gold_alignments_can_be_open_files(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("0-0 1-2 2-1\n")
    (tmp_path / "gold").write_text("0-0 1-1 2?1\n")
    with (tmp_path / "out").open() as out, (tmp_path / "gold").open() as gold:
        assert tj.alignment_error_rate(out, gold) == pytest.approx(1 - 3 / 5)
    with pytest.raises(UsageError, match="gold must be a list of strings, got '0-0'"):
        tj.alignment_error_rate(["0-0"], "0-0")


def test_the_error_rate_of_a_head_is_that_of_its_alignments(run: Run) -> None:
    gold = ["0-0 1-1", "0-0 1?1", "0-0", "0-0"]
    sure = [{(0, 0), (1, 1)}, *[{(0, 0)}] * 3]
    possible = [{(0, 0), (1, 1)}, {(0, 0), (1, 1)}, {(0, 0)}, {(0, 0)}]
    rates = run.alignment_error_rates(SOURCES, TARGETS, gold)
    assert rates.shape == (2, 2)
    for layer, head in np.ndindex(2, 2):
        correct = total = 0
        for i in range(4):
            links = align_words(run, i, run.attention(SOURCES[i], TARGETS[i]).cross[layer, head])
            correct += len(links & sure[i]) + len(links & possible[i])
            total += len(links) + len(sure[i])
        assert rates[layer, head] == pytest.approx(1 - correct / total)


def test_gold_links_outside_the_lines_are_rejected(run: Run) -> None:
    sources = ["one  two", ""]
    targets = ["eins zwei drei", "vier"]
    assert run.alignment_error_rates(sources, targets, ["0-0 1-2", ""]).shape == (2, 2)
    for gold, link, counts in (
        (["0-0 2-2", ""], "alignment 1: link 2-2", "2 and 3"),
        (["0?3 1-2", ""], "alignment 1: link 0-3", "2 and 3"),
        (["0-0", "0-0"], "alignment 2: link 0-0", "0 and 1"),
    ):
        message = f"{link} is outside the lines, which have {counts} words (words are counted "
        with pytest.raises(DataError, match=re.escape(message)):
            run.alignment_error_rates(sources, targets, gold)


def test_models_without_such_attention_are_rejected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer 2 does not exist"):
        run.align(SOURCES, TARGETS, layer=2)
    config = with_architecture("rnn", attention_score="none")
    rnn = load(write_untrained_run(tmp_path / "rnn", config, steps=(8,)).path)
    with pytest.raises(UsageError, match="this model does not attend to the source"):
        rnn.align(SOURCES, TARGETS)


def test_the_command_writes_the_alignments_of_its_translations(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    text, out = tmp_path / "in.txt", tmp_path / "out.txt"
    text.write_text(f"{SOURCES[0]}\n\n{SOURCES[1]}\n", "utf-8")
    words = ["translate", str(run.folder.path), "--beam-size", "1", "--alignments", str(out)]
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(words) == 0
    translations = capfd.readouterr().out.splitlines()
    expected = run.align([SOURCES[0], "", SOURCES[1]], translations)
    assert out.read_text().splitlines() == expected
    assert main(words) == 2
    assert "already exists" in capfd.readouterr().err
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main([*words[:-1], f"{out}.gz"]) == 0
    assert gzip.decompress(Path(f"{out}.gz").read_bytes()) == out.read_bytes()
    assert main([*words[:-1], f"{out}.zip"]) == 2
    assert "out.txt.zip cannot be a zip file" in capfd.readouterr().err
