import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from example_configs import read_pairs

from transformer_jax.analysis.significance import compare, save_comparison
from transformer_jax.errors import DataError
from transformer_jax.evaluation.evaluate import Evaluation
from transformer_jax.evaluation.scores import score
from transformer_jax.files import is_stray, read_json

PAIRS = read_pairs("train")[:150]
SOURCES, REFERENCES = (list(side) for side in zip(*PAIRS, strict=True))


def evaluation_of(hypotheses: list[str]) -> Evaluation:
    scores = score(hypotheses, REFERENCES, tokenizer="char")
    return Evaluation({"split": "dev"}, SOURCES, hypotheses, REFERENCES, scores, [])


def with_errors(every: int) -> Evaluation:
    """Return an evaluation in which every N-th translation omits its first three characters."""
    return evaluation_of([r[3:] if i % every == 0 else r for i, r in enumerate(REFERENCES)])


def test_a_comparison_equals_that_of_the_sacrebleu_command(tmp_path: Path) -> None:
    better, worse = with_errors(9), with_errors(7)
    files = {"reference": REFERENCES, "worse": worse.hypotheses, "better": better.hypotheses}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")

    def run(test: str) -> str:
        command = f"sacrebleu reference -i worse better -m bleu chrf -tok char {test} -f text -w 4"
        return subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    bleu, chrf = compare(better, worse, "char")
    values = [c.baseline for c in (bleu, chrf)] + [c.score for c in (bleu, chrf)]
    # For each metric, sacreBLEU prints the score, with "(p = ...)" below it.
    printed = run("--paired-ar --paired-ar-n 1000")
    assert all(f" {value:.4f} " in printed for value in values)
    assert re.findall(r"\(p = ([\d.]+)\)", printed) == [f"{c.p:.4f}" for c in (bleu, chrf)]
    # With this test, the command prints no intervals, and its bootstrap has other samples.
    intervals = re.findall(r"[\d.]+ \([\d.]+ ± ([\d.]+)\)", run("--paired-bs"))
    ours = [c.baseline_interval for c in (bleu, chrf)] + [c.interval for c in (bleu, chrf)]
    assert ours == pytest.approx([float(x) for x in intervals], rel=0.15)
    assert bleu.score > bleu.baseline


def test_only_a_large_enough_difference_is_significant() -> None:
    good, bad = with_errors(50), with_errors(3)
    assert all(c.p > 0.9 for c in compare(good, good, "char"))
    assert all(c.p < 0.01 for c in compare(good, bad, "char"))


def test_p_values_are_two_sided() -> None:
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(20):
        errors = rng.random((2, len(REFERENCES))) < 0.3
        ours, theirs = (
            evaluation_of([r[3:] if bad else r for r, bad in zip(REFERENCES, row, strict=True)])
            for row in errors
        )
        p_values.append(compare(ours, theirs, "char")[0].p)
    # The p-values of equal systems are uniform. Those of sacreBLEU's bootstrap are at most 0.5.
    assert max(p_values) > 0.7
    assert 0.3 < np.mean(p_values) < 0.7


@pytest.mark.parametrize(("number", "p"), [(1, 1.0), (2, 0.5), (4, 0.125), (6, 0.03125)])
def test_few_different_sentences_have_the_p_value_of_all_exchanges(number: int, p: float) -> None:
    """If all of n different sentences are worse, 2 of the 2^n exchanges differ as much."""
    worse = [r[3:] if i < number else r for i, r in enumerate(REFERENCES)]
    comparisons = compare(evaluation_of(worse), evaluation_of(REFERENCES), "char")
    assert [c.p for c in comparisons] == pytest.approx([p, p], abs=0.002)


@pytest.mark.slow
def test_a_comparison_is_repeatable_in_any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    better, worse = with_errors(9), with_errors(7)
    expected = compare(better, worse, "char")
    for seed in ("none", "7"):
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        assert compare(better, worse, "char") == expected
        assert os.environ["SACREBLEU_SEED"] == seed


def test_runs_with_different_references_are_not_compared() -> None:
    evaluation = with_errors(9)
    sides = {side: getattr(evaluation, side)[:9] for side in Evaluation._fields[1:4]}
    with pytest.raises(DataError, match="150 references in its dev set, and the other has 9"):
        compare(evaluation, evaluation._replace(**sides), "char")
    other = [*REFERENCES[:3], "nichts", *REFERENCES[4:]]
    with pytest.raises(DataError, match=r"reference 4 of their dev sets .* 'nichts' in the other"):
        compare(evaluation, evaluation._replace(references=other), "char")
    # The source sentences of two evaluations may differ.
    assert compare(evaluation, evaluation._replace(sources=other), "char")[0].p == 1


@pytest.mark.parametrize("run", ["run (1)", "run.sync-conflict-1", "r" * 255])
def test_a_comparison_is_stored_whatever_the_name_of_the_baseline(run: str, tmp_path: Path) -> None:
    save_comparison(tmp_path, {"run": run}, ["eins"])
    [stored] = tmp_path.glob("baseline-*.json")
    assert read_json(stored)["run"] == run
    assert not is_stray(stored.name)


def test_runs_of_the_same_name_have_separate_files(tmp_path: Path) -> None:
    for lines in (["eins"], ["zwei"], ["eins"]):
        save_comparison(tmp_path, {"run": "seed-0", "lines": lines}, lines)
    saved = sorted(tmp_path.glob("baseline-seed_0-*.json"))
    assert len(saved) == 2
    for path in saved:
        assert json.loads(path.read_text())["lines"] == [path.with_suffix(".txt").read_text()[:-1]]
