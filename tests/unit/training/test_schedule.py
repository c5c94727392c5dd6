"""Test the paper's learning rate against equation 3, and the other schedules by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import Floats, floats

from transformer_jax import ConfigError
from transformer_jax.config import Config, TrainConfig
from transformer_jax.training.schedule import learning_rate_schedule


def rate(step: float, d_model: int = 512, **changes: Any) -> float:
    config = TrainConfig(**changes)
    return float(learning_rate_schedule(config, d_model)(step))


def rates(last: int, d_model: int = 512, **changes: Any) -> Floats:
    """Return the learning rates of the steps from 1 to `last`."""
    schedule = learning_rate_schedule(TrainConfig(**changes), d_model)
    return floats(jax.vmap(schedule)(jnp.arange(1, last + 1)))


def test_learning_rate_is_equation_3() -> None:
    for step in (1, 2, 100, 3999, 4000, 4001, 100_000, 300_000):
        for d_model in (512, 1024):
            expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
            assert rate(step, d_model) == pytest.approx(expected, rel=1e-5)


def test_learning_rate_peaks_at_step_4000() -> None:
    values = rates(10_000)
    assert np.argmax(values) + 1 == 4000
    assert values.max() == pytest.approx(1 / math.sqrt(512 * 4000), rel=1e-5)
    assert values.max() == pytest.approx(6.99e-4, rel=1e-3)


def test_learning_rate_rises_linearly_then_falls_with_the_square_root() -> None:
    assert rate(2000) == pytest.approx(rate(4000) / 2, rel=1e-5)
    assert rate(1) == pytest.approx(rate(4000) / 4000, rel=1e-5)
    assert rate(16_000) == pytest.approx(rate(4000) / 2, rel=1e-5)


SCHEDULES = ("inverse_square_root", "constant", "cosine", "warmup_stable_decay")
SHORT = {"steps": 100, "warmup_steps": 20}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_rises_linearly_to_the_same_peak_and_never_rises_again(
    schedule: str,
) -> None:
    scaled = rates(120, 64, schedule=schedule, learning_rate_scale=0.5, **SHORT)
    peak = 0.5 * 64**-0.5 * 20**-0.5
    np.testing.assert_allclose(scaled[:20], peak * np.arange(1, 21) / 20, rtol=1e-5)
    assert np.all(np.diff(scaled[19:]) <= 0)
    absolute = rates(120, 64, schedule=schedule, peak_learning_rate=1e-4, **SHORT)
    np.testing.assert_allclose(absolute, scaled * 1e-4 / peak, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 10**6, 1.0),
        ("cosine", 40, (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 60, 0.5),
        ("cosine", 100, 0.0),
        ("cosine", 110, 0.0),
        ("warmup_stable_decay", 80, 1.0),
        ("warmup_stable_decay", 85, 0.75),
        ("warmup_stable_decay", 99, 0.05),
        ("warmup_stable_decay", 100, 0.0),
    ],
)
def test_schedules_have_the_rates_that_their_formulas_give(
    schedule: str, step: int, expected: float
) -> None:
    actual = rate(step, schedule=schedule, peak_learning_rate=2.0, **SHORT)
    assert actual == pytest.approx(2 * expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
def test_decaying_schedules_end_at_decay_steps(schedule: str) -> None:
    fields = {"schedule": schedule, "warmup_steps": 20}
    long = rates(200, steps=200, **fields)
    np.testing.assert_array_equal(rates(200, steps=50, decay_steps=200, **fields), long)
    assert abs(rates(200, steps=100, **fields) - long).max() > 1e-4


def test_a_decay_never_begins_before_the_end_of_the_warmup() -> None:
    fields = {"schedule": "warmup_stable_decay", "decay_fraction": 0.9, **SHORT}
    values = rates(100, **fields)
    assert np.argmax(values) + 1 == 20
    np.testing.assert_allclose(values[[59, 99]], [values[19] / 2, 0], atol=1e-9)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"peak_learning_rate": 1e-4, "learning_rate_scale": 2.0},
            "train.learning_rate_scale must be 1 with train.peak_learning_rate",
        ),
        ({"decay_steps": 9}, "train.decay_steps must be None with train.schedule inverse_square"),
        ({"schedule": "cosine", "decay_steps": 9_000}, r"train.steps must be at most .*\(9000\)"),
        ({"schedule": "cosine", "steps": 8}, "train.warmup_steps must be less than 8"),
        ({"weight_decay": 0.1}, r"train.weight_decay must be 0 with train.optimizer adam \(try"),
        ({"optimizer": "schedule_free"}, "train.schedule must be constant with train.optimizer"),
        (
            {"optimizer": "schedule_free", "schedule": "constant", "ema_decay": 0.9},
            "train.ema_decay must be None with train.optimizer schedule_free",
        ),
    ],
)
def test_fields_that_conflict_are_one_clear_error(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config().change(train=train)
