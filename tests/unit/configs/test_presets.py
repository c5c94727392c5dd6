"""Test that each preset reproduces how its original implementation differs from the paper."""

import ast
import math
from typing import Any

import pytest
from pages import ROOT

from transformer_jax.config.loading import load_config, load_row, load_rows
from transformer_jax.sweeps.tuning import plan_tuning
from transformer_jax.training.schedule import learning_rate_schedule

PRESETS = load_rows("presets")
SINUSOIDS = {"positions": "concatenated_sinusoidal"}
PRE_NORM = {"layer_norm": "pre", "attention_dropout": 0.1, "activation_dropout": 0.1}
TOKENS = {"batch_tokens": 32_768}
OTHERS = {"label_smoothing_over": "other_tokens"}
LATER = OTHERS | {"learning_rate_scale": 2.0, "warmup_steps": 8000}
LONGER = {"max_extra_length": 100}
BIG = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}

EXPECTED: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "t2t_2017": {
        "model": SINUSOIDS | {"attention_bias": True},
        "data": TOKENS,
        "train": OTHERS,
    },
    "t2t_v1": {"model": SINUSOIDS, "data": TOKENS, "train": OTHERS, "decode": LONGER},
    "t2t_v2": {"model": SINUSOIDS | PRE_NORM, "data": TOKENS, "train": LATER, "decode": LONGER},
    "t2t_v3": {
        "model": SINUSOIDS | PRE_NORM,
        "data": TOKENS,
        "train": LATER | {"adam_beta2": 0.997},
        "decode": LONGER,
    },
    "flax_wmt": {
        "model": SINUSOIDS | PRE_NORM | BIG | {"dtype": "bfloat16"},
        "data": {"vocab_size": 32_000, "batch_tokens": 65_536},
        "train": OTHERS
        | {"warmup_steps": 1000, "learning_rate_scale": pytest.approx(2.0239, rel=1e-4)},
    },
}


def test_every_preset_differs_from_the_paper_exactly_as_its_authors_code_does() -> None:
    base = load_config("base").to_dict()
    differences = {
        name: {
            section: changed
            for section, fields in row.config.to_dict().items()
            if (changed := {k: v for k, v in fields.items() if v != base[section][k]})
        }
        for name, row in PRESETS.items()
    }
    assert differences == EXPECTED


def rate(name: str, step: int) -> float:
    config = PRESETS[name].config
    return float(learning_rate_schedule(config.train, config.model.d_model)(step))


@pytest.mark.parametrize("step", [10, 1000, 8000, 50_000])
def test_the_learning_rate_follows_the_authors_own_schedules(step: int) -> None:
    """These schedules count steps from 1, as the paper does."""
    # Tensor2Tensor's "legacy noam" learning rate is 0.002 x 5000 x learning_rate x decay.
    for name, constant, warmup in (("t2t_v1", 0.1, 4000), ("t2t_v2", 0.2, 8000)):
        decay = 5000.0 * 512**-0.5 * min(step * warmup**-1.5, step**-0.5)
        assert rate(name, step) == pytest.approx(0.002 * constant * decay, rel=1e-5)
    # In Flax's WMT example, the learning rate rises linearly to 0.002 over 1,000 steps. It then
    # decays with the inverse square root of the step.
    expected = 0.002 * (step / 1000 if step <= 1000 else math.sqrt(1000 / step))
    assert rate("flax_wmt", step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "study", ["table3_multi30k", "learned_or_sinusoidal", "recurrence", "since2017"]
)
def test_the_command_of_a_study_trains_a_negative_control(study: str) -> None:
    tree = ast.parse((ROOT / "configs" / f"{study}.py").read_text("utf-8"))
    command = (ast.get_docstring(tree) or "").partition(" sweep ")[2].partition("\n\n")[0]
    assert "--control" in command.partition("transformer-jax")[0].split()


def test_each_row_of_the_recurrence_sweep_can_have_its_own_learning_rate() -> None:
    rows = load_rows("recurrence")
    rates = [0.0015, 0.003, 0.006]
    assert {row.config.train.peak_learning_rate for row in rows.values()} == {rates[1]}
    assert plan_tuning(rows, "train.peak_learning_rate", rates).values == tuple(rates)
    base = load_row("table3_multi30k:base").config
    peak = base.train.learning_rate_scale / (base.model.d_model * base.train.warmup_steps) ** 0.5
    assert peak == pytest.approx(rates[1])
