from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import SMALL

from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.build import build_transformer
from transformer_jax.model.losses import Loss, cross_entropy
from transformer_jax.training.step import TrainState, init_state, make_train_step, split_rows

VOCAB = 20
CALM = SMALL.change(model={"dropout": 0.0})


def batch_of(rows: int, seed: int = 0) -> Batch:
    """Rows of very unlike length, so that a mean of means differs from the mean."""
    rng = np.random.default_rng(seed)
    block = rng.integers(4, VOCAB, (2, rows, 9)).astype(np.int32)
    lengths = rng.integers(1, 10, (2, rows, 1))
    return Batch(*jnp.asarray(np.where(np.arange(9) < lengths, block, 0)))


def update(config: TrainConfig, batch: Batch, *, model: Any = CALM.model) -> TrainState:
    transformer = build_transformer(model, VOCAB)
    step = jax.jit(make_train_step(transformer, config))
    state, _ = step(init_state(transformer, config), batch)
    return state


def assert_close(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), left, right)


def largest_difference(left: Any, right: Any) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), left, right)))


def test_the_gradient_is_that_of_the_mean_loss_per_token() -> None:
    transformer, batch = build_transformer(CALM.model, VOCAB), batch_of(6)
    state = init_state(transformer, CALM.train)

    def mean_loss(params: Any) -> jax.Array:
        logits: Any = transformer.apply({"params": params}, *batch)
        loss = cross_entropy(logits, jnp.asarray(batch.target), 0.1)
        return loss.smoothed / loss.count

    gradient = jax.jit(jax.grad(mean_loss))(state.params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    new, metrics = jax.jit(make_train_step(transformer, CALM.train))(state, batch)
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    # After one update Adam's mean of gradients is (1 - beta1) times the gradient.
    first_moment = new.optimizer[0].mu
    assert_close(first_moment, jax.tree.map(lambda g: 0.1 * g, gradient))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_micro_batches_give_the_update_of_the_whole_batch(parts: int) -> None:
    # 10 rows do not divide by 3 or 4; lengths differ, so parts have unlike numbers of tokens.
    whole = update(CALM.train, batch_of(10))
    split = update(CALM.change(train={"gradient_accumulation_steps": parts}).train, batch_of(10))
    assert_close(whole.optimizer[0].mu, split.optimizer[0].mu)


def test_micro_batches_hold_each_row_once() -> None:
    batch = batch_of(10)
    parts = split_rows(batch, 4)
    assert parts.source.shape == (4, 3, 9)
    rows = np.asarray(parts.source).reshape(-1, 9)
    expected = np.concatenate([np.asarray(batch.source), np.zeros((2, 9), np.int32)])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, expected))


def test_empty_rows_change_nothing() -> None:
    batch = batch_of(6)
    longer = Batch(*(jnp.pad(side, ((0, 2), (0, 0))) for side in batch))
    one, other = update(CALM.train, batch), update(CALM.train, longer)
    assert_close(one.optimizer[0].mu, other.optimizer[0].mu)


def test_dropout_is_a_function_of_seed_and_step() -> None:
    noisy = SMALL.change(model={"dropout": 0.5})
    transformer, batch = build_transformer(noisy.model, VOCAB), batch_of(6)
    step = jax.jit(make_train_step(transformer, noisy.train))
    state = init_state(transformer, noisy.train)
    again, later = state._replace(), state._replace(step=jnp.int32(1))
    loss, same, other = (float(step(s, batch)[1].loss.nll) for s in (state, again, later))
    assert loss == same
    assert loss != other


def test_parameters_are_a_function_of_the_seed() -> None:
    transformer = build_transformer(SMALL.model, VOCAB)
    one, same, other = (
        init_state(transformer, SMALL.change(train={"seed": seed}).train).params
        for seed in (1, 1, 2)
    )
    assert largest_difference(one, same) == 0
    assert largest_difference(one, other) > 0.1


def test_clipping_bounds_the_gradient_that_adam_sees() -> None:
    clipped = update(CALM.change(train={"clip_norm": 1e-3}).train, batch_of(6))
    # optax.chain(clip, adam): Adam's state is the second one's first.
    mean = clipped.optimizer[1][0].mu
    norm = float(jnp.sqrt(sum(jnp.sum(m * m) for m in jax.tree.leaves(mean))))
    np.testing.assert_allclose(norm, 0.1 * 1e-3, rtol=1e-4)


def test_a_step_learns_what_it_is_shown() -> None:
    config = CALM.change(train={"warmup_steps": 50, "label_smoothing": 0.0})
    transformer, batch = build_transformer(config.model, VOCAB), batch_of(8)
    step = jax.jit(make_train_step(transformer, config.train))
    state = init_state(transformer, config.train)
    losses = []
    for _ in range(150):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss.nll / metrics.loss.count))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["a gradient", "the loss"])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(
    value: float, where: str
) -> None:
    transformer, batch = build_transformer(CALM.model, VOCAB), batch_of(6)
    step = make_train_step(transformer, CALM.train)
    state = init_state(transformer, CALM.train)
    state, _ = jax.jit(step)(state, batch)
    gradients, loss = step.sums(state, batch, jnp.int32(0))
    table = gradients["embedding"]["table"]
    if where == "a gradient":
        gradients["embedding"]["table"] = table.at[5, 3].set(value)
    else:
        loss = loss._replace(smoothed=loss.smoothed + value)
    new, metrics = jax.jit(step.update)(state, (gradients, loss))
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, new.optimizer, state.optimizer)
    assert (int(new.step), int(new.skipped), int(new.skipped_in_a_row)) == (2, 1, 1)
    assert [float(x) for x in metrics.loss] == [0.0, 0.0, 0.0]
    again, _ = jax.jit(step.update)(new, (gradients, loss))
    assert (int(again.skipped), int(again.skipped_in_a_row)) == (2, 2)
    better, _ = jax.jit(step)(again, batch)
    assert (int(better.step), int(better.skipped), int(better.skipped_in_a_row)) == (4, 2, 0)
    assert largest_difference(better.params, state.params) > 0


def test_parts_of_a_batch_draw_masks_of_their_own() -> None:
    noisy = SMALL.change(model={"dropout": 0.5})
    transformer, batch = build_transformer(noisy.model, VOCAB), batch_of(6)
    step = make_train_step(transformer, noisy.train)
    state = init_state(transformer, noisy.train)
    losses = {float(jax.jit(step.sums)(state, batch, jnp.int32(part))[1].nll) for part in range(3)}
    assert len(losses) == 3


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what XLA makes of it on a CPU")
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_update_copies_no_moments(clip_norm: float | None) -> None:
    transformer = build_transformer(CALM.model, 5000)
    config = CALM.change(train={"clip_norm": clip_norm}).train
    step = make_train_step(transformer, config)
    state = jax.eval_shape(lambda: init_state(transformer, config))
    sums = jax.eval_shape(lambda: (state.params, Loss(*jnp.zeros(3))))
    program: Any = jax.jit(step.update, donate_argnums=0).lower(state, sums).compile()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    # As much for the gradient's squares, of which the norm is made; twice as much with copies.
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * size
