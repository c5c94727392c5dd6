"""Test the learning rate against Equation 3, Adam against its algorithm, and gradient clipping."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import Floats, normal

from transformer_jax.config import TrainConfig
from transformer_jax.training.optimizer import clip_by_known_norm, learning_rate, make_optimizer


def test_clipping_by_a_known_norm_equals_clipping_by_global_norm() -> None:
    gradients: Any = {"a": normal(0, 5, 4), "b": [normal(1, 3), jnp.zeros(2)]}
    norm = optax.tree.norm(gradients)
    assert 0.5 < norm < 7
    for max_norm in (0.5, 7.0, 100.0):
        ours, theirs = clip_by_known_norm(max_norm), optax.clip_by_global_norm(max_norm)
        clipped, state = ours.update(gradients, ours.init(gradients), norm=norm)
        expected, expected_state = theirs.update(gradients, theirs.init(gradients))
        assert state == expected_state
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)


def rate(step: float, **changes: Any) -> float:
    return float(learning_rate(step, **{"d_model": 512, "warmup_steps": 4000, **changes}))


def test_learning_rate_is_equation_3() -> None:
    for step in (1, 2, 100, 3999, 4000, 4001, 100_000, 300_000):
        for d_model in (512, 1024):
            expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
            assert rate(step, d_model=d_model) == pytest.approx(expected, rel=1e-5)


def test_learning_rate_peaks_at_step_4000() -> None:
    steps = jnp.arange(1, 10_001)
    rates = np.asarray(
        jax.vmap(lambda step: learning_rate(step, d_model=512, warmup_steps=4000))(steps)
    )
    assert np.argmax(rates) + 1 == 4000
    assert rates.max() == pytest.approx(1 / math.sqrt(512 * 4000), rel=1e-5)
    assert rates.max() == pytest.approx(6.99e-4, rel=1e-3)


def test_learning_rate_rises_linearly_then_falls_with_the_square_root() -> None:
    assert rate(2000) == pytest.approx(rate(4000) / 2, rel=1e-5)
    assert rate(1) == pytest.approx(rate(4000) / 4000, rel=1e-5)
    assert rate(16_000) == pytest.approx(rate(4000) / 2, rel=1e-5)


def test_learning_rate_scale_multiplies_the_learning_rate() -> None:
    assert rate(123, scale=2.5) == pytest.approx(2.5 * rate(123), rel=1e-5)


def updates_of(config: TrainConfig, gradients: list[Floats]) -> list[Floats]:
    """Return the optimizer's updates for a sequence of gradients."""
    optimizer = make_optimizer(config, 512)
    state: optax.OptState = optimizer.init(jnp.zeros(3))
    updates: list[Floats] = []
    for gradient in gradients:
        update, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state)
        updates.append(np.asarray(update, np.float64))
    return updates


def test_the_first_update_uses_the_rate_of_step_one() -> None:
    """Adam's first update is the negated learning rate times the sign of the gradient."""
    (update,) = updates_of(TrainConfig(), [np.array([2.0, -0.5, 30.0])])
    np.testing.assert_allclose(update, -rate(1) * np.array([1, -1, 1]), rtol=1e-5)


def test_updates_are_those_of_adam() -> None:
    """Compare with algorithm 1 of Kingma and Ba (2015), using the constants from section 5.3."""
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(3) * [1.0, 1e-3, 1e-9] for _ in range(5)]
    mean, square = np.zeros(3), np.zeros(3)
    actual = updates_of(TrainConfig(warmup_steps=3), gradients)
    for step, (gradient, update) in enumerate(zip(gradients, actual, strict=True), start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        mean_hat, square_hat = mean / (1 - 0.9**step), square / (1 - 0.98**step)
        expected = -rate(step, warmup_steps=3) * mean_hat / (np.sqrt(square_hat) + 1e-9)
        np.testing.assert_allclose(update, expected, rtol=1e-3)
