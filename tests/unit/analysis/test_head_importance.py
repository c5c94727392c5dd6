"""Test the importance of each head against the loss of the model without that head."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from transformer_jax import load
from transformer_jax.analysis.head_importance import (
    Head,
    HeadImportance,
    head_importance,
    mask_heads,
)
from transformer_jax.errors import UsageError
from transformer_jax.evaluation.evaluate import prepare_split
from transformer_jax.evaluation.perplexity import score_sentences, scoring_batches
from transformer_jax.inference.trained_run import Run
from transformer_jax.progress import report_to


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"positions": "learned"})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=2.0).path)


def test_importance_is_the_loss_without_each_head(run: Run) -> None:
    counts: list[tuple[int, int]] = []

    def record(title: str, done: int, total: int) -> None:
        if title == "masking heads":
            counts.append((done, total))

    with report_to(record):
        importance = head_importance(run, num_sentences=8, margin=math.inf)
    # With an unlimited margin, 13 losses are computed: one without masks and two for each head.
    assert list(dict.fromkeys(counts)) == [(i, 13) for i in range(14)]
    tokens = [
        side._replace(offsets=side.offsets[:9]) for side in prepare_split(run, "dev").tokens("dev")
    ]
    batches = scoring_batches(*tokens)

    def loss(mask: np.ndarray) -> float:
        scores = score_sentences(run.model, mask_heads(run.params, mask), batches)
        return sum(x.nll for x in scores) / sum(x.target_tokens for x in scores)

    assert importance.loss == pytest.approx(loss(np.ones((3, 1, 2), bool)))
    for index in np.ndindex(3, 1, 2):
        mask = np.ones((3, 1, 2), bool)
        mask[index] = False
        assert importance.masked_losses[index] == pytest.approx(loss(mask))
    assert np.ptp(importance.masked_losses) > 1e-4
    # With an unlimited margin, every head can be masked.
    assert importance.num_prunable == 6
    assert importance.pruned_losses[-1] == pytest.approx(loss(np.zeros((3, 1, 2), bool)))
    images = [image for axes in importance.plot().figure.axes[:3] for image in axes.images]
    for image, losses in zip(images, importance.masked_losses, strict=True):
        np.testing.assert_array_equal(np.asarray(image.get_array()), losses - importance.loss)


def test_pruning_masks_the_least_important_heads_first() -> None:
    masked = np.array([[[2.3, 2.0]], [[2.1, 2.5]], [[2.2, 2.05]]])
    importance = HeadImportance(2.0, masked, np.array([2.0, 2.0, 2.04, 2.2]), 0.1)
    assert importance.order[:3] == [
        Head("encoder", 0, 1),
        Head("cross", 0, 1),
        Head("decoder", 0, 0),
    ]
    assert importance.num_prunable == 2
    assert np.argwhere(~importance.mask(2)).tolist() == [[0, 0, 1], [2, 0, 1]]
    assert importance.mask(0).all()


def test_invalid_options_of_the_importance_are_errors(run: Run) -> None:
    with pytest.raises(
        UsageError, match="the number of sentences must be positive, got 0; pass num_sentences=256"
    ):
        head_importance(run, num_sentences=0)
    for margin in (-1.0, math.nan):
        with pytest.raises(UsageError, match="the margin must be at least 0"):
            head_importance(run, margin=margin)


def test_heads_of_a_model_without_a_finite_loss_are_not_compared(run: Run) -> None:
    diverged = replace(run, params=jax.tree.map(lambda x: x * math.nan, run.params))
    with pytest.raises(
        UsageError, match=r"the loss of .*run at step 8 is nan, so its heads cannot"
    ):
        head_importance(diverged, num_sentences=8)
