import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_configs import read_pairs

from transformer_jax.analysis.significance import compare, save_comparison
from transformer_jax.errors import DataError
from transformer_jax.evaluation.evaluate import Evaluation
from transformer_jax.evaluation.scores import score

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
    command = "sacrebleu reference -i worse better -m bleu chrf -tok char --paired-bs -f text -w 4"
    ended = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    # For each metric, sacreBLEU prints "score (mean ± interval)" with "(p = ...)" below it.
    score_and_interval = re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", ended.stdout)
    p_values = re.findall(r"\(p = ([\d.]+)\)", ended.stdout)
    bleu, chrf = compare(better, worse, "char")
    assert score_and_interval == [
        (f"{value:.4f}", f"{interval:.4f}")
        for value, interval in (
            (bleu.baseline, bleu.baseline_interval),
            (chrf.baseline, chrf.baseline_interval),
            (bleu.score, bleu.interval),
            (chrf.score, chrf.interval),
        )
    ]
    assert p_values == [f"{c.p:.4f}" for c in (bleu, chrf)]
    assert bleu.score > bleu.baseline


def test_only_a_large_enough_difference_is_significant() -> None:
    good, bad = with_errors(50), with_errors(3)
    assert all(c.p > 0.9 for c in compare(good, good, "char"))
    assert all(c.p < 0.01 for c in compare(good, bad, "char"))


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


def test_runs_of_the_same_name_have_separate_files(tmp_path: Path) -> None:
    for lines in (["eins"], ["zwei"], ["eins"]):
        save_comparison(tmp_path, {"run": "seed-0", "lines": lines}, lines)
    saved = sorted(tmp_path.glob("baseline-seed-0-*.json"))
    assert len(saved) == 2
    for path in saved:
        assert json.loads(path.read_text())["lines"] == [path.with_suffix(".txt").read_text()[:-1]]
