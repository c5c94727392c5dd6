"""Test that a step uses the gradient of the mean loss per token and has reproducible dropout."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import lower_for
from example_configs import SMALL
from flax import linen as nn
from jaxtyping import Array
from oracles import apply

from transformer_jax import registry
from transformer_jax.config import Config, ModelConfig, TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.build import build_transformer
from transformer_jax.model.losses import Loss, cross_entropy
from transformer_jax.model.target_platform import tracing_for
from transformer_jax.training.step import (
    Numbers,
    TrainState,
    TrainStep,
    init_state,
    split_rows,
)

VOCAB = 20
NO_DROPOUT = SMALL.change(model={"dropout": 0.0})
DROPOUT = SMALL.change(model={"dropout": 0.5})


def random_batch(rows: int = 10) -> Batch:
    """Return rows of different lengths, so that averages over rows and over tokens differ."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCAB, (2, rows, 9)).astype(np.int32)
    lengths = rng.integers(1, 10, (2, rows, 1))
    return Batch(*jnp.asarray(np.where(np.arange(9) < lengths, tokens, 0)))


BATCH = random_batch()


@cache
def compile_step(config: Config, platform: str = "cpu") -> TrainStep:
    """Return a step with two jitted functions that all tests share.

    The update is traced as if for `platform`, but both compiled programs run on this machine.
    """

    def apply_for_platform(*arguments: Any) -> Any:
        with tracing_for(platform):
            return TrainStep.apply_gradients(*arguments)

    class JittedStep(TrainStep):
        compute_gradients = jax.jit(TrainStep.compute_gradients, static_argnums=0)
        apply_gradients = jax.jit(apply_for_platform, static_argnums=0)

    return JittedStep(build_transformer(config.model, VOCAB), config.train)


@cache
def initial_state(config: Config) -> TrainState:
    return init_state(build_transformer(config.model, VOCAB), config.train)


def first_moment(config: Config, batch: Batch = BATCH) -> Any:
    """Return Adam's first moment after one step, which is (1 - beta1) times the gradient."""
    state, _ = compile_step(config)(initial_state(config), batch)
    optimizer: Any = state.opt_state
    return (optimizer if config.train.clip_norm is None else optimizer[1])[0].mu


def assert_close(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), left, right)


def largest_difference(left: Any, right: Any) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), left, right)))


def global_norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def test_the_gradient_is_that_of_the_mean_loss_per_token() -> None:
    transformer, state = build_transformer(NO_DROPOUT.model, VOCAB), initial_state(NO_DROPOUT)

    def mean_loss(params: Any) -> jax.Array:
        logits: Any = transformer.apply({"params": params}, *BATCH)
        loss = cross_entropy(logits, BATCH.target, 0.1)
        return loss.smoothed / loss.count

    gradient = jax.jit(jax.grad(mean_loss))(state.params)
    _, metrics = compile_step(NO_DROPOUT)(state, BATCH)
    np.testing.assert_allclose(metrics.gradient_norm, global_norm(gradient), rtol=1e-5)
    assert_close(first_moment(NO_DROPOUT), jax.tree.map(lambda g: 0.1 * g, gradient))


def test_label_smoothing_can_exclude_the_true_token() -> None:
    config = NO_DROPOUT.change(train={"label_smoothing_over": "other_tokens"})
    state = initial_state(config)
    _, loss = compile_step(config).compute_gradients(state, BATCH)
    transformer = build_transformer(config.model, VOCAB)
    logits = apply(transformer, state.params, *BATCH)
    expected = cross_entropy(logits, BATCH.target, 0.1 * VOCAB / (VOCAB - 1))
    assert float(loss.smoothed) == pytest.approx(float(expected.smoothed), rel=1e-6)
    assert float(loss.smoothed) != float(cross_entropy(logits, BATCH.target, 0.1).smoothed)


def test_training_minimizes_a_loss_from_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def minus_entropy(logits: Array, target: Array, config: TrainConfig) -> Loss:
        loss = cross_entropy(logits, target, config.label_smoothing)
        log_p = jax.nn.log_softmax(logits)
        values = jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return loss._replace(smoothed=jnp.sum(values, where=target != 0))

    monkeypatch.setitem(
        registry._parts["train.loss"],
        "minus_entropy",
        registry.Part(minus_entropy, is_foreign=True, file=None),
    )
    config = NO_DROPOUT.change(train={"loss": "minus_entropy"})
    step, state = compile_step(config), initial_state(config)
    before, after = (
        step.compute_gradients(state, BATCH) for state in (state, step(state, BATCH)[0])
    )
    assert float(after[1].smoothed) < float(before[1].smoothed)
    plain = compile_step(NO_DROPOUT).compute_gradients(state, BATCH)
    # The new loss does not affect the negative log-likelihood, which determines the perplexity.
    assert before[1][1:] == plain[1][1:]
    assert largest_difference(before[0], plain[0]) > 0.1


# The 10 rows are not divisible by 3, and the micro-batches have different numbers of tokens.
@pytest.mark.parametrize("num_micro_batches", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradient_accumulation_does_not_change_the_update(num_micro_batches: int) -> None:
    accumulating = NO_DROPOUT.change(train={"gradient_accumulation_steps": num_micro_batches})
    assert_close(first_moment(accumulating), first_moment(NO_DROPOUT))


def test_micro_batches_contain_each_row_once() -> None:
    micro_batches = split_rows(BATCH, 4)
    assert micro_batches.source.shape == (4, 3, 9)
    rows = np.asarray(micro_batches.source).reshape(-1, 9)
    expected = np.concatenate([np.asarray(BATCH.source), np.zeros((2, 9), np.int32)])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, expected))


def test_empty_rows_do_not_change_the_update() -> None:
    padded = Batch(*(jnp.pad(side, ((0, 2), (0, 0))) for side in BATCH))
    assert_close(first_moment(NO_DROPOUT, padded), first_moment(NO_DROPOUT))


def test_dropout_is_a_function_of_seed_and_step() -> None:
    state = initial_state(DROPOUT)

    def loss(*, seed: int = 0, step: int = 0) -> float:
        changed = state._replace(seed=jnp.int32(seed), step=jnp.int32(step))
        _, loss = compile_step(DROPOUT).compute_gradients(changed, BATCH)
        return float(loss.nll)

    assert loss() == loss()
    assert len({loss(), loss(seed=1), loss(step=1)}) == 3


def test_each_micro_batch_draws_its_own_dropout_masks() -> None:
    def losses(config: Config) -> list[float]:
        """Return the loss of a row in the first micro-batch, and of the same row in the second."""
        step = compile_step(config.change(train={"gradient_accumulation_steps": 2}))
        row = Batch(*(side[:1] for side in BATCH))
        pairs = (Batch(*(jnp.pad(side, ((i, 1 - i), (0, 0))) for side in row)) for i in (0, 1))
        return [float(step.compute_gradients(initial_state(config), x)[1].nll) for x in pairs]

    assert len(set(losses(NO_DROPOUT))) == 1
    assert len(set(losses(DROPOUT))) == 2


def test_initial_parameters_are_a_function_of_the_seed() -> None:
    params, same, other = (
        init_state(
            build_transformer(SMALL.model, VOCAB), SMALL.change(train={"seed": seed}).train
        ).params
        for seed in (1, 1, 2)
    )
    assert largest_difference(params, same) == 0
    assert largest_difference(params, other) > 0.1


def test_clipping_bounds_the_gradient_that_adam_receives() -> None:
    moment = first_moment(NO_DROPOUT.change(train={"clip_norm": 1e-3}))
    np.testing.assert_allclose(global_norm(moment), 0.1 * 1e-3, rtol=1e-4)


@pytest.mark.slow
def test_repeated_steps_on_one_batch_learn_it() -> None:
    config = NO_DROPOUT.change(train={"warmup_steps": 50, "label_smoothing": 0.0})
    step = jax.jit(TrainStep(build_transformer(config.model, VOCAB), config.train))
    state, losses = initial_state(config), list[float]()
    for _ in range(150):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics.loss.nll / metrics.loss.count))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("value", "location", "platform"),
    [
        (np.nan, "gradient", "cpu"),
        (np.inf, "loss", "cpu"),
        (np.inf, "gradient", "tpu"),
        (np.nan, "loss", "tpu"),
    ],
)
def test_a_step_without_finite_values_changes_only_the_counts(
    value: float, location: str, platform: str
) -> None:
    step = compile_step(NO_DROPOUT, platform)
    state, _ = step(initial_state(NO_DROPOUT), BATCH)
    gradients, loss = step.compute_gradients(state, BATCH)
    if location == "gradient":
        table = gradients["embedding"]["table"]
        gradients["embedding"]["table"] = table.at[5, 3].set(value)
    else:
        loss = loss._replace(smoothed=loss.smoothed + value)
    skipped, metrics = step.apply_gradients(state, (gradients, loss))
    jax.tree.map(np.testing.assert_array_equal, skipped.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, skipped.opt_state, state.opt_state)
    assert (int(skipped.step), int(skipped.skipped), int(skipped.skipped_in_a_row)) == (2, 1, 1)
    assert [float(x) for x in metrics.loss] == [0.0, 0.0, 0.0]
    again, _ = step.apply_gradients(skipped, (gradients, loss))
    assert (int(again.skipped), int(again.skipped_in_a_row)) == (2, 2)
    finite, _ = step(again, BATCH)
    assert (int(finite.step), int(finite.skipped), int(finite.skipped_in_a_row)) == (4, 2, 0)
    assert largest_difference(finite.params, state.params) > 0


def test_only_a_cpu_updates_in_a_branch() -> None:
    step = TrainStep(build_transformer(NO_DROPOUT.model, VOCAB), NO_DROPOUT.train)
    state = initial_state(NO_DROPOUT)
    sums = state.params, Loss(*jnp.ones(3))
    assert "stablehlo.case" in lower_for("cpu", step.apply_gradients, state, sums)
    for platform in ("cuda", "tpu"):
        assert "stablehlo.case" not in lower_for(platform, step.apply_gradients, state, sums)


@pytest.mark.slow
def test_only_a_gpu_rounds_gradients_to_multiply_them_in_bfloat16() -> None:
    config = NO_DROPOUT.change(model={"dtype": "bfloat16"})
    step = TrainStep(build_transformer(config.model, VOCAB), config.train)
    arrays = initial_state(config), BATCH
    pattern = r"stablehlo.dot_general .* : \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)"
    gpu, tpu = (
        re.findall(pattern, lower_for(platform, step.compute_gradients, *arrays))
        for platform in ("cuda", "tpu")
    )
    assert set(gpu) == {("bf16", "bf16")}
    assert len(tpu) == len(gpu)
    # The products with float32 operands are in the backward pass: two for the logits, and two for
    # the scores in each of the three attention sub-layers.
    assert sum("f32" in operands for operands in tpu) == 2 * (1 + 3)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="inspects the program of XLA on a CPU")
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_update_does_not_copy_the_moments(clip_norm: float | None) -> None:
    transformer = build_transformer(NO_DROPOUT.model, 5000)
    config = NO_DROPOUT.change(train={"clip_norm": clip_norm}).train
    step = TrainStep(transformer, config)
    state = jax.eval_shape(lambda: init_state(transformer, config))
    sums = jax.eval_shape(lambda: (state.params, Loss(*jnp.zeros(3))))
    program: Any = jax.jit(step.apply_gradients, donate_argnums=0).lower(state, sums).compile()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    # Computing the norm requires the squared gradient, which takes as much memory as the
    # parameters. Copies of the two moments would take twice as much memory as the parameters.
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * size


def step_with_arguments(config: Config) -> Any:
    """Return a function of (state, numbers, batch) that ignores the config's numeric settings."""
    step = TrainStep(build_transformer(config.model, VOCAB), config.train)

    def train_step(state: TrainState, numbers: Numbers, batch: Batch) -> Any:
        return step.with_numbers(numbers)(state, batch)

    return train_step


def numbers_of(config: Config) -> Numbers:
    return TrainStep(build_transformer(config.model, VOCAB), config.train).make_numbers()


# None of these configs shares a program with the base config, but they all share one program.
ALL_ON = NO_DROPOUT.change(
    model={"attention_dropout": 0.2, "activation_dropout": 0.3},
    train={"clip_norm": 1.0, "z_loss": 1e-3, "weight_decay": 0.01, "optimizer": "adamw"},
)
ALL_CHANGED = ALL_ON.change(
    model={"dropout": 0.4, "attention_dropout": 0.1, "activation_dropout": 0.1},
    train={
        "clip_norm": 0.5,
        "z_loss": 1e-2,
        "weight_decay": 0.1,
        "label_smoothing": 0.3,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-3,
        "learning_rate_scale": 0.5,
        "warmup_steps": 7,
    },
)


@pytest.mark.slow
def test_numbers_have_the_same_effect_as_arguments_and_as_constants() -> None:
    changed = {key for _, key in ALL_CHANGED.differences(ALL_ON)}
    numbers = numbers_of(ALL_CHANGED)
    assert changed == numbers.model.keys() | numbers.train.keys() - {"decay_fraction"}
    with_arguments, with_constants = (
        jax.jit(step_with_arguments(ALL_ON)),
        jax.jit(TrainStep(build_transformer(ALL_CHANGED.model, VOCAB), ALL_CHANGED.train)),
    )
    state = expected = initial_state(ALL_ON)
    for _ in range(2):
        state, metrics = with_arguments(state, numbers, BATCH)
        expected, expected_metrics = with_constants(expected, BATCH)
        np.testing.assert_allclose(metrics.loss, expected_metrics.loss, rtol=1e-5)
    assert_close(state.params, expected.params)
    other, _ = with_arguments(initial_state(ALL_ON), numbers_of(ALL_ON), BATCH)
    assert largest_difference(other.params, state.params) > 1e-4


@pytest.mark.slow
def test_vmap_maps_a_step_over_states_numbers_and_batches() -> None:
    step = step_with_arguments(DROPOUT)
    configs = (DROPOUT, NO_DROPOUT.change(train={"seed": 1, "learning_rate_scale": 0.5}))
    states = [initial_state(config) for config in configs]
    numbers = [numbers_of(config) for config in configs]
    batches = [BATCH, Batch(BATCH.source[::-1], BATCH.target[::-1])]
    stacked = (
        jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (states, numbers, batches)
    )
    together, _ = jax.jit(jax.vmap(step))(*stacked)
    single = jax.jit(step)
    for index, arguments in enumerate(zip(states, numbers, batches, strict=True)):
        alone, _ = single(*arguments)
        assert_close(jax.tree.map(lambda x, i=index: x[i], together.params), alone.params)


@pytest.mark.usefixtures("forget_parts")
def test_parts_from_outside_the_package_receive_python_numbers() -> None:
    received: list[object] = []

    def make_optimizer(config: TrainConfig, rate: optax.Schedule) -> Any:
        received.append(config.adam_beta1)
        return optax.sgd(rate, momentum=0.5 if config.weight_decay else None)

    def schedule(config: TrainConfig, peak: float) -> Any:
        received.extend((config.warmup_steps, peak))
        return lambda step: peak * min(config.warmup_steps, 10) * step

    def loss(logits: Array, target: Array, config: TrainConfig) -> Loss:
        received.append(config.label_smoothing)
        return cross_entropy(logits, target, config.label_smoothing if config.z_loss else 0.0)

    parts = {"optimizer": make_optimizer, "schedule": schedule, "loss": loss}
    for field, part in parts.items():
        registry.register(f"train.{field}", "conditional")(part)
    config = NO_DROPOUT.change(train={**dict.fromkeys(parts, "conditional"), "weight_decay": 0.1})
    state = initial_state(config)
    received.clear()
    jax.eval_shape(step_with_arguments(config), state, numbers_of(config), BATCH)
    assert received
    assert {type(value) for value in received} <= {int, float}


@pytest.mark.usefixtures("forget_parts")
def test_the_parts_of_a_model_receive_python_numbers_if_one_is_from_outside() -> None:
    @registry.register("model.feed_forward", "conditional")
    class Conditional(nn.Module):
        config: ModelConfig

        def __call__(self, x: Array, *, train: bool = False) -> Array:  # noqa: ARG002
            return 2 * x if self.config.dropout > 0.05 else x

    config = DROPOUT.change(model={"feed_forward": "conditional"})
    assert not numbers_of(config).model
    assert numbers_of(DROPOUT).model.keys() == {"dropout"}
    assert jax.eval_shape(
        step_with_arguments(config), initial_state(config), numbers_of(config), BATCH
    )
