"""Test optimizers against their published algorithms, and gradient clipping."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_configs import SMALL
from model_variants import VARIANTS
from oracles import Floats, floats, normal

from transformer_jax.baselines.build import build_model
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.errors import ConfigError
from transformer_jax.model.encoder_decoder import init_params, make_rng
from transformer_jax.training.optimizer import (
    clip_by_known_norm,
    evaluation_params,
    is_matrix,
    make_optimizer,
)
from transformer_jax.training.schedule import learning_rate_schedule
from transformer_jax.training.width import parameter_groups


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
    return float(learning_rate_schedule(TrainConfig(**changes), 512)(step))


def updates_of(config: TrainConfig, gradients: list[Floats]) -> list[Floats]:
    """Return the optimizer's updates for a sequence of gradients."""
    optimizer = make_optimizer(config, ModelConfig())
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


MATRIX, BIAS = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]), np.array([0.5, -1.0, 2.0])


def train_two_steps(**fields: Any) -> tuple[list[dict[str, Floats]], list[dict[str, Floats]]]:
    """Return two random gradients, and the parameters before and after each of two steps."""
    config = TrainConfig(warmup_steps=3, **fields)
    optimizer = make_optimizer(config, ModelConfig())
    params: Any = {"kernel": jnp.asarray(MATRIX), "bias": jnp.asarray(BIAS)}
    state = optimizer.init(params)
    generator = np.random.default_rng(0)
    gradients = [
        {"kernel": generator.standard_normal((2, 3)), "bias": generator.standard_normal(3)}
        for _ in range(2)
    ]
    history = [params]
    for gradient in gradients:
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return gradients, jax.tree.map(floats, history)


@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_adamw_decays_only_matrices_by_the_learning_rate_times_the_weight_decay(name: str) -> None:
    """Compare with algorithm 2 of Loshchilov and Hutter (2019)."""
    gradients, history = train_two_steps(optimizer="adamw", weight_decay=0.1)
    decay = 0.1 if name == "kernel" else 0.0
    expected, mean, square = history[0][name], np.zeros(()), np.zeros(())
    for step, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient[name]
        square = 0.98 * square + 0.02 * gradient[name] ** 2
        update = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.98**step)) + 1e-9)
        expected = expected - rate(step, warmup_steps=3) * (update + decay * expected)
        np.testing.assert_allclose(history[step][name], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_lion_moves_by_the_sign_of_its_interpolated_momentum(name: str) -> None:
    """Compare with algorithm 2 of Chen et al. (2023)."""
    gradients, history = train_two_steps(optimizer="lion", weight_decay=0.1)
    decay = 0.1 if name == "kernel" else 0.0
    expected, momentum = history[0][name], np.zeros(())
    for step, gradient in enumerate(gradients, start=1):
        update = np.sign(0.9 * momentum + 0.1 * gradient[name])
        momentum = 0.99 * momentum + 0.01 * gradient[name]
        expected = expected - rate(step, warmup_steps=3) * (update + decay * expected)
        np.testing.assert_allclose(history[step][name], expected, rtol=1e-5)


def small_params(**model: Any) -> Any:
    config = SMALL.change(model=model)
    return init_params(build_model(config.model, 20), make_rng(jnp.int32(0)))


def names(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, keyed by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.slow
def test_only_kernels_are_matrices() -> None:
    for changes in [changes for changes in VARIANTS if "architecture" not in changes]:
        shapes = jax.eval_shape(partial(small_params, **changes))
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for name, matrix in names(is_matrix(params)).items():
            assert matrix == name.endswith("/kernel"), (changes, name)
        try:
            model = SMALL.change(model=changes, train={"base_width": 8}).model
        except ConfigError:
            continue
        # Each parameter of a model that `train.base_width` accepts has a known group.
        for name, group in names(parameter_groups(model, params)).items():
            assert group.endswith("matrix") == name.endswith("/kernel"), (changes, name)


def first_update(optimizer: str, gradients: Any, params: Any) -> dict[str, Floats]:
    """Return the first update, divided by the negated learning rate."""
    made = make_optimizer(TrainConfig(optimizer=optimizer), ModelConfig())
    updates, _ = made.update(gradients, made.init(params), params)
    return {name: -floats(leaf) / rate(1) for name, leaf in names(updates).items()}


def test_muon_orthogonalizes_each_projection_as_one_matrix_and_leaves_the_rest_to_adam() -> None:
    params = small_params(d_model=32, num_heads=2, d_k=6, d_v=6)
    gradients = jax.tree.map(lambda p: normal(p.size, *p.shape), params)
    muon, adam = (first_update(name, gradients, params) for name in ("muon", "adam"))
    for name, update in muon.items():
        if not name.endswith("/kernel"):
            np.testing.assert_array_equal(update, adam[name])
            continue
        # Reshape the query projection [D, H, K] to [D, H K], and the output projection [H, V, D] to
        # [H V, D].
        splits = any(part in name for part in ("query", "key", "value"))
        matrix = update.reshape((len(update), -1) if splits else (-1, update.shape[-1]))
        scale = 0.2 * max(matrix.shape) ** 0.5
        singular = np.linalg.svd(matrix / scale, compute_uv=False)
        # The authors' five iterations give singular values between about 0.7 and 1.2.
        assert len(singular) == min(matrix.shape)
        assert 0.6 < singular.min() < singular.max() < 1.3, name
    assert "embedding/table" in muon


def test_adafactor_stores_one_number_for_each_row_and_column_of_a_large_matrix() -> None:
    params: Any = {"kernel": jnp.zeros((128, 256))}
    state = make_optimizer(TrainConfig(optimizer="adafactor"), ModelConfig()).init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 128 + 256 + 10


def test_schedule_free_evaluates_the_average_of_its_iterates() -> None:
    """Compare with algorithm 1 of Defazio et al. (2024), on the quadratic loss x^2 / 2."""
    config = TrainConfig(optimizer="schedule_free", schedule="constant", warmup_steps=3)
    optimizer = make_optimizer(config, ModelConfig())
    params: Any = {"kernel": jnp.asarray(MATRIX)}
    state = optimizer.init(params)
    x, z, square, total = MATRIX, MATRIX, np.zeros(()), 0.0
    for step in range(1, 7):
        y = 0.1 * z + 0.9 * x
        np.testing.assert_allclose(params["kernel"], y, rtol=1e-5)
        # The gradient of the loss at y is y.
        updates, state = optimizer.update(params, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        square = 0.98 * square + 0.02 * y**2
        now = rate(step, schedule="constant", warmup_steps=3)
        z = z - now * y / (np.sqrt(square / (1 - 0.98**step)) + 1e-9)
        total += now**2
        weight = now**2 / total
        x = (1 - weight) * x + weight * z
        averaged: Any = evaluation_params(params, state)
        np.testing.assert_allclose(averaged["kernel"], x, rtol=1e-5)
    assert abs(x - z).max() > 0.01 * abs(x - MATRIX).max()


def test_a_moving_average_is_evaluated_but_does_not_change_training() -> None:
    """Compare with the average that TensorFlow documents, in a loop."""
    params: Any = {"kernel": jnp.asarray(MATRIX)}
    plain = make_optimizer(TrainConfig(), ModelConfig())
    optimizer = make_optimizer(TrainConfig(ema_decay=0.3, clip_norm=1e9), ModelConfig())
    state, plain_state, average = optimizer.init(params), plain.init(params), MATRIX
    for step in range(1, 7):
        gradients = jax.tree.map(lambda x, step=step: jnp.cos(step * x), params)
        expected, plain_state = plain.update(gradients, plain_state, params)
        updates, state = optimizer.update(gradients, state, params, norm=jnp.ones([]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
        params = jax.tree.map(jnp.add, params, updates)
        decay = min(0.3, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * np.asarray(params["kernel"])
        averaged: Any = evaluation_params(params, state)
        np.testing.assert_allclose(averaged["kernel"], average, rtol=1e-6)


def test_most_optimizers_evaluate_the_parameters_that_they_train() -> None:
    params: Any = {"kernel": jnp.asarray(MATRIX)}
    for name in ("adam", "adamw", "lion", "adafactor", "muon"):
        state = make_optimizer(TrainConfig(optimizer=name, clip_norm=1.0), ModelConfig()).init(
            params
        )
        assert evaluation_params(params, state) is params
