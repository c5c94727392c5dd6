"""Test the plots that need a model's parameters: head importance, positions, and losses."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from small import SMALL
from untrained import write_untrained_run

from transformer_jax import load, plot_positions
from transformer_jax.cli import main
from transformer_jax.errors import UsageError
from transformer_jax.inference.evaluate import prepare_split
from transformer_jax.inference.head_importance import (
    Head,
    HeadImportance,
    head_importance,
)
from transformer_jax.inference.perplexity import score_sentences, score_tokens
from transformer_jax.inference.plots import loss_by_length, loss_by_position
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.head_mask import mask_heads


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"positions": "learned"})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=2.0).path)


def test_importance_is_the_loss_without_each_head(run: Run) -> None:
    counts: list[tuple[int, int]] = []

    def progress(title: str, done: int, total: int) -> None:
        if title == "masking heads":
            counts.append((done, total))

    importance = head_importance(run, num_sentences=8, margin=math.inf, progress=progress)
    # With an unlimited margin, all losses are needed: without masks, and twice for each head.
    assert counts == [(i, 13) for i in range(1, 14)]
    tokens = [
        side._replace(offsets=side.offsets[:9])
        for side in prepare_split("dev", of=run).tokens("dev")
    ]

    def loss(mask: np.ndarray) -> float:
        scores = score_sentences(run.model, mask_heads(run.params, mask), *tokens)
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
        UsageError, match="must be sentences to score, got 0; pass num_sentences=256"
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


@pytest.mark.slow
def test_the_losses_of_tokens_add_up_to_those_of_sentences(run: Run) -> None:
    sides = prepare_split("dev", of=run).tokens("dev")
    source, target = (side._replace(offsets=side.offsets[:31]) for side in sides)
    sentences = score_sentences(run.model, run.params, source, target)
    losses = score_tokens(run.model, run.params, source, target)
    assert [len(x) for x in losses] == [x.target_tokens for x in sentences]
    np.testing.assert_allclose([x.sum() for x in losses], [x.nll for x in sentences], rtol=1e-5)


def test_means_by_position_and_length_are_those_of_the_sentences() -> None:
    # Use 20 sentences with 1 token each and 20 sentences with 3 tokens each.
    short, long = [np.array([1.0])] * 20, [np.array([3.0, 2.0, 4.0])] * 20
    by_position = loss_by_position("x", [*long, *short])
    assert (by_position.x.tolist(), by_position.y.tolist()) == ([1, 2, 3], [2.0, 2.0, 4.0])
    half = 1.96 * float(np.std([1.0, 3.0] * 20, ddof=1)) / math.sqrt(40)
    assert by_position.high[0] - 2.0 == pytest.approx(half)
    by_length = loss_by_length("x", [*long, *short])
    assert (by_length.x.tolist(), by_length.y.tolist()) == ([1.0, 3.0], [1.0, 3.0])
    # If a group has too few sentences, it is merged into the previous group.
    few = loss_by_length("x", [*long[:5], *short])
    assert few.y.tolist() == [pytest.approx((20 + 5 * 9) / (20 + 5 * 3))]
    assert loss_by_position("x", [*long[:5], *short]).x.tolist() == [1]


def test_a_learned_table_appears_before_and_after_training(run: Run) -> None:
    axes = {x.get_title(): x for x in plot_positions(run, num_positions=12).figure.axes}
    images = {name: np.asarray(x.images[0].get_array()) for name, x in axes.items() if x.images}
    table = np.asarray(run.params["source_positions"]["positions"])
    np.testing.assert_array_equal(images["learned, after training"], table[:12])
    assert images["learned, before training"].shape == (12, 16)
    assert abs(images["learned, before training"] - table[:12]).max() > 0.1
    np.testing.assert_array_equal(images["sinusoids"][0], [0.0, 1.0] * 8)


def test_positions_that_do_not_exist_are_errors(run: Run) -> None:
    for count in (3, 65):
        with pytest.raises(UsageError, match=f"must be from 4 to 64 for .*, got {count}$"):
            plot_positions(run, num_positions=count)
    for offset in (0, 7):
        with pytest.raises(UsageError, match=f"must be from 1 to 6, .* got {offset}$"):
            plot_positions(run, num_positions=12, offset=offset)


def test_the_command_says_why_a_run_has_no_such_picture(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SMALL.change(model={"positions": "rotary"})
    rotary = str(write_untrained_run(tmp_path / "rotary", config, steps=(8,)).path)
    config = SMALL.change(model={"num_decoder_layers": 2})
    deeper = str(write_untrained_run(tmp_path / "deeper", config, steps=(8,)).path)
    path, out = str(run.folder.path), str(tmp_path / "x.svg")
    mistakes: dict[tuple[str, ...], str] = {
        (rotary, "--kind", "positions", "--out", out): "with model.positions rotary, positions act",
        (): "plot needs a run",
        (path,): "plot needs an output file: --out curves.svg",
        (path, "--out", "x.gif"): "the name of the file must end in .svg or .png, got 'x.gif'",
        (path, rotary, "--kind", "heads", "--out", out): "--kind heads plots one run, got 2",
        (path, "--offset", "2", "--out", out): "--offset is for --kind positions, not curves",
        (path, "--kind", "loss", "--margin", "1", "--out", out): "is for --kind heads, not loss",
        (
            deeper,
            "--kind",
            "heads",
            "--out",
            out,
        ): "same number of layers, but this model has 1 and 2",
        (path, "--kind", "head"): "did you mean 'heads'?",
        (path, "--kind", "heads", "--num-sentences", "0", "--out", out): "pass --num-sentences 256",
        (path, "--out", out): "there are no metrics of run",
    }
    for arguments, message in mistakes.items():
        assert main(["plot", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not Path(out).exists()


@pytest.mark.parametrize(
    "kind", ["positions", *(pytest.param(x, marks=pytest.mark.slow) for x in ("loss", "heads"))]
)
def test_the_command_draws_what_needs_parameters(
    run: Run, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    options = ("--num-sentences", "8") if kind == "heads" else ()
    assert main(["plot", str(run.folder.path), "--kind", kind, *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"written to {out}\n")
    assert ("of 6 heads can be masked" in printed) == (kind == "heads")
    assert out.read_text().count("<svg") == 1
