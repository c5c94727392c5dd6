import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_configs import SMALL
from oracles import floats
from run_files import write_untrained_run

from transformer_jax.data.prepare import prepare_text
from transformer_jax.evaluation.evaluate import prepare_split
from transformer_jax.evaluation.perplexity import (
    SentenceScore,
    perplexity,
    score_sentences,
    score_with_loss,
    scoring_batches,
)
from transformer_jax.inference.trained_run import Run, load


def test_the_score_of_a_sentence_does_not_depend_on_other_sentences(tmp_path: Path) -> None:
    run = load(write_untrained_run(tmp_path / "run", steps=(8,)).path, average_checkpoints=1)
    sides = prepare_text(run.config.data, run.vocabulary).tokens("dev")
    source, target = (type(side)(side.flat, side.offsets[:21]) for side in sides)
    model: Any = jax.jit(lambda s, t: run.model.apply({"params": run.params}, s, t))
    expected: list[SentenceScore] = []
    for i in range(20):
        s, t = (side.pad(np.array([i]), 1, 40) for side in (source, target))
        logits = floats(model(s, t))[0]
        length = int(target.lengths[i])
        nll = sum(
            float(np.log(np.exp(logits[position]).sum()) - logits[position, token])
            for position, token in enumerate(t[0][:length])
        )
        expected.append(SentenceScore(int(source.lengths[i]), length, nll))
    assert len({score.target_tokens for score in expected}) > 3
    actual = score_sentences(run.model, run.params, scoring_batches(source, target))
    assert [score[:2] for score in actual] == [score[:2] for score in expected]
    np.testing.assert_allclose(
        [score.nll for score in actual], [score.nll for score in expected], rtol=1e-5
    )


def test_perplexity_is_per_token_over_all_sentences() -> None:
    sentences = [SentenceScore(3, 2, 1.5), SentenceScore(9, 8, 8.5)]
    assert perplexity(sentences) == pytest.approx(math.exp(10 / 10))
    # The perplexity must be finite no matter how wrong the model is.
    assert math.isfinite(perplexity([SentenceScore(1, 1, 1e9)]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"positions": "learned"})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=2.0).path)


def test_the_smoothed_loss_is_that_of_training_per_token(run: Run) -> None:
    source, target = (
        type(side)(side.flat, side.offsets[:10]) for side in prepare_split(run, "dev").tokens("dev")
    )
    batches = scoring_batches(source, target)
    config = dataclasses.replace(run.config.train, label_smoothing=0.3, z_loss=0.01)
    model: Any = jax.jit(lambda s, t: run.model.apply({"params": run.params}, s, t))
    losses: list[float] = []
    for i in range(9):
        s, t = (side.pad(np.array([i]), 1, 40) for side in (source, target))
        logits = floats(model(s, t))[0]
        for row, token in zip(logits, t[0][: target.lengths[i]], strict=False):
            log_total = np.log(np.exp(row).sum())
            wanted = np.full(len(row), 0.3 / len(row))
            wanted[token] += 0.7
            losses.append(wanted @ (log_total - row) + 0.01 * log_total**2)
    sentences, loss = score_with_loss(run.model, run.params, batches, config)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert sentences == score_sentences(run.model, run.params, batches)
