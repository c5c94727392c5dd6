"""Test the experiments with learning rates by width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import activations

from experiments import width
from experiments.width import check_table, main, make_batches, make_config, measure_changes
from transformer_jax.baselines.build import build_model
from transformer_jax.special_tokens import PAD
from transformer_jax.training.step import init_state


def test_the_changes_are_those_of_the_formulas_after_one_step_of_adam() -> None:
    # With the paper's rule, the rate at width 8 is twice that at width 32.
    config = make_config(8, "the paper", 2.0**-6, label_smoothing=0.0)
    batches = make_batches(config)
    source, target = map(jnp.asarray, batches[0])
    model = build_model(config.model, config.data.vocab_size)
    before = init_state(model, config.train).params

    def loss(params: Any) -> Any:
        logits = jnp.asarray(model.apply({"params": params}, source, target))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return losses.mean(where=target != PAD)

    # The bias-corrected means of Adam's first step are the gradient and its square.
    gradients = jax.jit(jax.grad(loss))(before)
    after = jax.tree.map(lambda x, g: x - 2.0**-5 * g / (abs(g) + 1e-9), before, gradients)
    old, new = (activations(params, source, target) for params in (before, after))
    expected = {
        name: np.abs(new[name] - old[name]).mean() for name in ("encoder", "decoder", "logits")
    }
    for name in ("encoder", "decoder"):
        expected[name] /= np.abs(old[name]).mean()
    changes = {name: x for name, [x] in measure_changes(config, batches, 1).items()}
    assert changes == pytest.approx(expected, rel=1e-4)
    assert min(expected.values()) > 0.1


@pytest.mark.exhaustive
def test_changes_grow_with_the_width_except_with_a_base_width() -> None:
    _, *rows = check_table([32, 256])
    values = [[float(cell) for cell in row[2:]] for row in rows]
    narrow, one_rate, *_ = values
    _, _, narrow_paper, paper, narrow_base, base = values
    assert narrow == narrow_paper == narrow_base
    for first, *wide in zip(narrow, one_rate, paper, base, strict=True):
        growth = [x / first for x in wide]
        assert growth[0] > 3
        assert growth[1] > 2
        assert 0.5 < growth[2] < 1.5


@pytest.mark.slow
def test_both_rules_have_the_same_losses_at_the_base_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SWEEP_STEPS": 10, "LAST_STEPS": 2, "RATES": (2.0**-13, 2.0**-5)}.items():
        monkeypatch.setattr(width, name, value)
    assert main(["--rates", "--widths", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, _, paper, base = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert header == ["rule", "width", "2^-13", "2^-5", "best"]
    assert paper[1:] == base[1:]
    # With the low rate, the loss hardly changes from its initial value.
    assert float(paper[3]) < float(paper[2])
    assert paper[4] == "2^-5"


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--widths", "32", "2"], ["--widths", "6"]])
def test_invalid_numbers_are_rejected(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert " must be " in capsys.readouterr().err
