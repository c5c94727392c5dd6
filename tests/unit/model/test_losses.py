"""Test the loss against a dense float64 cross-entropy with smoothed targets (section 5.4)."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import lower_for
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from numpy.typing import ArrayLike
from oracles import Floats, examples, floats, normal, softmax

from transformer_jax.config import TrainConfig
from transformer_jax.model.losses import (
    LOSSES,
    Loss,
    cross_entropy,
    smoothing_over_other_tokens,
)
from transformer_jax.model.target_platform import tracing_for

SMOOTHING = st.sampled_from([0.0, 0.1, 0.2, 0.9])
SEED = st.integers(0, 10_000)
VOCABULARY = 7


def draw_tokens(seed: int, rows: int, length: int) -> Array:
    """Draw random tokens, about a quarter of which are padding."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(1, VOCABULARY, (rows, length))
    return jnp.asarray(np.where(generator.random((rows, length)) < 0.25, 0, drawn))


def sums(loss: Loss) -> Floats:
    """Return the smoothed loss, the negative log-likelihood, and the token count as one array."""
    return floats([float(field) for field in loss])


def smoothed_target(target: int, vocabulary: int, smoothing: float) -> Floats:
    """Return the smoothed distribution: eps / V for each token, plus 1 - eps for the true token."""
    return (1 - smoothing) * np.eye(vocabulary)[target] + smoothing / vocabulary


def dense_loss(logits: ArrayLike, target: ArrayLike, smoothing: float) -> Floats:
    """Return three sums: the smoothed loss, the negative log-likelihood, and the token count."""
    total = np.zeros(3)
    x, t = floats(logits), np.asarray(target)
    for index in np.ndindex(t.shape):
        if t[index] != 0:
            log_p = np.log(softmax(x[index]))
            q = smoothed_target(t[index], x.shape[-1], smoothing)
            total += np.array([-(q @ log_p), -log_p[t[index]], 1.0])
    return total


@given(seed=SEED, smoothing=SMOOTHING, size=st.sampled_from([(1, 1), (2, 5)]))
@examples(40)
def test_loss_is_the_cross_entropy_with_the_smoothed_target(
    seed: int, smoothing: float, size: tuple[int, int]
) -> None:
    logits, target = 3 * normal(seed, *size, VOCABULARY), draw_tokens(seed, *size)
    expected = dense_loss(logits, target, smoothing)
    np.testing.assert_allclose(sums(cross_entropy(logits, target, smoothing)), expected, rtol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_loss_and_gradient_do_not_depend_on_the_platform(platform: str) -> None:
    logits, target = 3 * normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    # Include large logits, and a logit that excludes a token other than the target.
    logits = logits.at[0, 0].multiply(1000).at[0, 1, (int(target[0, 1]) + 1) % 7].set(-1e30)

    def gradient(logits: jax.Array) -> Any:
        def objective(x: jax.Array) -> Any:
            loss = cross_entropy(x, target, 0.1, z_loss=1e-3)
            return loss.smoothed + 0.3 * loss.nll, loss

        return jax.value_and_grad(objective, has_aux=True)(logits)

    expected = gradient(logits)
    with tracing_for(platform):
        actual = gradient(logits)
    for left, right in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_the_loss_on_a_gpu_has_no_scatter() -> None:
    logits, target = normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    gradient = jax.grad(lambda x, t: cross_entropy(x, t, 0.1).smoothed)
    assert "scatter" in lower_for("cpu", gradient, logits, target)
    assert "scatter" not in lower_for("cuda", gradient, logits, target)


def test_a_gpu_reduces_the_logits_once() -> None:
    logits, target = normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    gradient = jax.value_and_grad(lambda x, t: cross_entropy(x, t, 0.1).smoothed)
    reductions = r"across dimensions = \[2\]"
    assert len(re.findall(reductions, lower_for("cpu", gradient, logits, target))) > 1
    assert len(re.findall(reductions, lower_for("cuda", gradient, logits, target))) == 1


def test_padding_adds_nothing_to_loss_gradient_or_count() -> None:
    logits, target = normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    is_padding = np.asarray(target) == 0
    assert is_padding.any()
    changed = jnp.where(is_padding[..., None], 100.0 * normal(1, 2, 5, VOCABULARY), logits)
    loss = cross_entropy(logits, target, 0.1)
    assert cross_entropy(changed, target, 0.1) == loss
    assert loss.count == (~is_padding).sum()

    gradient = jax.grad(lambda x: cross_entropy(x, target, 0.1).smoothed)(logits)
    np.testing.assert_array_equal(~np.any(gradient, axis=-1), is_padding)


def test_a_batch_of_only_padding_has_loss_zero() -> None:
    loss = cross_entropy(normal(0, 2, 3, VOCABULARY), jnp.zeros((2, 3), int), 0.1)
    assert sums(loss).tolist() == [0.0, 0.0, 0.0]


def test_negative_log_likelihood_is_not_smoothed() -> None:
    logits, target = normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    smoothed, plain = cross_entropy(logits, target, 0.3), cross_entropy(logits, target, 0.0)
    assert smoothed.nll == plain.nll
    assert plain.smoothed == pytest.approx(float(plain.nll), rel=1e-6)
    assert abs(float(smoothed.smoothed - smoothed.nll)) > 0.1


def test_a_uniform_prediction_has_the_vocabulary_size_as_perplexity() -> None:
    loss = cross_entropy(jnp.full((2, 5, VOCABULARY), 3.0), draw_tokens(1, 2, 5), 0.1)
    assert float(jnp.exp(loss.nll / loss.count)) == pytest.approx(VOCABULARY, rel=1e-5)
    assert float(jnp.exp(loss.smoothed / loss.count)) == pytest.approx(VOCABULARY, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_the_minimum_loss_is_the_entropy_of_the_smoothed_target(smoothing: float) -> None:
    """A prediction more confident than the smoothed target has a higher loss (section 5.4)."""
    target = smoothed_target(3, VOCABULARY, smoothing)
    entropy = -(target @ np.log(target))
    best = jnp.log(jnp.asarray(target))[None, None]

    def loss(logits: Array) -> Array:
        return cross_entropy(logits, jnp.asarray([[3]]), smoothing).smoothed

    assert float(loss(best)) == pytest.approx(entropy, rel=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(best), 0, atol=1e-6)
    for seed in range(5):
        assert float(loss(best + 0.1 * normal(seed, 1, 1, VOCABULARY))) > entropy
    assert float(loss(100.0 * jnp.eye(VOCABULARY)[3][None, None])) > entropy


@given(seed=SEED, smoothing=SMOOTHING)
@examples(10)
def test_losses_of_two_batches_add_up_to_the_loss_of_both(seed: int, smoothing: float) -> None:
    logits, target = normal(seed, 4, 5, VOCABULARY), draw_tokens(seed, 4, 5)
    first, second = (cross_entropy(logits[i], target[i], smoothing) for i in (np.s_[:2], np.s_[2:]))
    both = cross_entropy(logits, target, smoothing)
    np.testing.assert_allclose(sums(first) + sums(second), sums(both), rtol=1e-5)


def test_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    logits, target = normal(0, 2, 5, VOCABULARY).astype(jnp.bfloat16), draw_tokens(1, 2, 5)
    expected = dense_loss(logits.astype(jnp.float32), target, 0.1)
    np.testing.assert_allclose(sums(cross_entropy(logits, target, 0.1)), expected, rtol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_gradient_of_bfloat16_logits_differs_only_by_rounding(platform: str) -> None:
    logits, target = 3 * normal(0, 4, 6, VOCABULARY), draw_tokens(1, 4, 6)

    def gradient(dtype: str) -> Any:
        def loss(logits: Array) -> Array:
            return cross_entropy(logits.astype(dtype), target, 0.1).smoothed

        return floats(jax.grad(loss)(logits))

    with tracing_for(platform):
        exact, rounded = gradient("float32"), gradient("bfloat16")
    # A bfloat16 number has a relative error of at most 2^-8. The errors of two logits change the
    # probability of a token by a factor of at most exp(2 * error).
    error = 2.0**-8 * float(jnp.abs(logits).max())
    change = floats(jax.nn.softmax(logits)) * math.expm1(2 * error)
    bound = change + 2.0**-8 * (np.abs(exact) + change) + 1e-6
    assert (np.abs(rounded - exact) <= bound).all()
    assert np.abs(rounded - exact).max() > 1e-4


def test_very_confident_predictions_have_a_finite_loss() -> None:
    logits = 1e4 * normal(0, 2, 5, VOCABULARY)
    assert np.all(np.isfinite(sums(cross_entropy(logits, draw_tokens(1, 2, 5), 0.1))))


@pytest.mark.parametrize("coefficient", [1e-4, 0.5])
def test_z_loss_adds_the_squared_log_of_the_softmax_denominator(coefficient: float) -> None:
    logits, target = 3 * normal(0, 2, 5, VOCABULARY), draw_tokens(1, 2, 5)
    log_z = np.log(np.exp(floats(logits)).sum(axis=-1))
    added = coefficient * (log_z**2)[np.asarray(target) != 0].sum()
    expected = dense_loss(logits, target, 0.1) + np.array([added, 0, 0])
    config = TrainConfig(z_loss=coefficient)
    loss = LOSSES[config.loss](logits, target, config)
    np.testing.assert_allclose(sums(loss), expected, rtol=1e-6)


@given(seed=SEED, smoothing=st.sampled_from([0.0, 0.1, 0.2]))
@examples(10)
def test_smoothing_over_other_tokens_excludes_the_true_token(seed: int, smoothing: float) -> None:
    logits, target = 3 * normal(seed, 2, 5, VOCABULARY), draw_tokens(seed, 2, 5)
    expected = 0.0
    for index in np.ndindex(target.shape):
        if (true := int(target[index])) != 0:
            q = np.full(VOCABULARY, smoothing / (VOCABULARY - 1))
            q[true] = 1 - smoothing
            expected -= float(q @ np.log(softmax(floats(logits)[index])))
    changed = smoothing_over_other_tokens(smoothing, VOCABULARY)
    loss = cross_entropy(logits, target, changed)
    assert float(loss.smoothed) == pytest.approx(expected, rel=1e-5)
    assert smoothing == 0 or changed > smoothing
