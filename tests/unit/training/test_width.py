"""Compare `train.base_width` with Table 8 of Yang et al. (2022), and with the paper's model."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_configs import SMALL
from flax import linen as nn
from jaxtyping import Array
from models import SOURCE, TARGET, VOCABULARY

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.attention import dot_product
from transformer_jax.model.build import build_transformer
from transformer_jax.model.embeddings import Embedding
from transformer_jax.model.encoder_decoder import init_params, make_rng
from transformer_jax.model.losses import cross_entropy
from transformer_jax.training.schedule import learning_rate
from transformer_jax.training.step import TrainStep, init_state
from transformer_jax.training.width import Factors, width_factors

BASE_WIDTH, BASE_D_K, RATIO = 8, 4, 4
BATCH, STEPS = Batch(SOURCE, TARGET), 5
WIDE = SMALL.change(
    model={"d_model": 32, "d_ff": 64, "d_k": 16, "d_v": 16, "dropout": 0.0},
    train={"base_width": BASE_WIDTH, "warmup_steps": 2, "adam_epsilon": 1e-20},
)
PRE_NORM = {
    "model": {
        "layer_norm": "pre",
        "norm": "rms_norm",
        "tie_embeddings": "none",
        "positions": "learned",
        "attention_bias": True,
        "output_bias": True,
    },
    "train": {"optimizer": "adamw", "weight_decay": 0.3},
}
QUERY_KEY_NORM = {"model": {"query_key_norm": True}, "train": {"optimizer": "lion"}}


def table_8_logits(config: ModelConfig, params: Any) -> Array:
    """Return the logits of a model with explicit multipliers, relative to the base width.

    Logits are multiplied by 1 / width, and scores are divided by d_k.
    """

    def multiply(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if isinstance(context.module, Embedding):
            match context.method_name:
                case "embed":
                    # As in the model of the base width, multiply by the root of the base width.
                    return result * (BASE_WIDTH / model.config.d_model) ** 0.5
                case "logits":
                    return result * BASE_WIDTH / model.config.d_model
        return result

    def make_score(_config: Any) -> Any:
        scale = BASE_D_K**0.5 / config.d_k
        return lambda query, key: dot_product(query, key) * scale

    model = build_transformer(config, VOCABULARY)
    model = model.clone(components=replace(model.components, make_score=make_score))
    with nn.intercept_methods(multiply):
        return jnp.asarray(model.apply({"params": params}, SOURCE, TARGET))


def train_by_table_8(config: ModelConfig, train: TrainConfig, params: Any) -> list[float]:
    """Return the loss before each of a few steps with the learning rates in Table 8."""
    kinds = jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)

    def make(name: str, factor: float, weight_decay: float) -> optax.GradientTransformation:
        def rate(count: Any) -> Array:
            return factor * learning_rate(count + 1, d_model=BASE_WIDTH, warmup_steps=2)

        if name == "lion":
            return optax.lion(rate, weight_decay=0.0)
        return optax.adamw(rate, b2=0.98, eps=1e-20, weight_decay=weight_decay)

    # Weight decay is independent of the width.
    hidden = make(train.optimizer, 1 / RATIO, RATIO * train.weight_decay)
    optimizer = optax.partition({True: hidden, False: make(train.optimizer, 1, 0.0)}, kinds)

    def smoothed_loss(params: Any) -> tuple[Array, Array]:
        loss = cross_entropy(table_8_logits(config, params), TARGET, 0.1)
        return loss.smoothed / loss.count, loss.smoothed

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients, loss = jax.grad(smoothed_loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses: list[float] = []
    state = optimizer.init(params)
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def table_8_init(config: ModelConfig) -> Any:
    """Return the initial parameters of the model with explicit multipliers.

    The variance of hidden matrices is proportional to 1 / fan_in, as in the paper's model. That of
    embeddings and positions is 1 / base width, and norms and biases are ones and zeros.
    """
    params = init_params(build_transformer(config, VOCABULARY), make_rng(0))

    def scale(path: Any, leaf: Array) -> Array:
        return leaf * (RATIO**0.5 if path[-1].key in ("table", "positions") else 1)

    return jax.tree.map_with_path(scale, params)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(PRE_NORM, marks=pytest.mark.exhaustive),
        pytest.param(QUERY_KEY_NORM, marks=pytest.mark.exhaustive),
    ],
    ids=["paper", "pre_norm", "query_key_norm"],
)
def test_training_equals_that_of_a_model_with_the_multipliers_of_table_8(
    changes: dict[str, Any],
) -> None:
    config = WIDE.change(**changes)
    train, model_config = config.train, replace(config.model, dtype="float64")
    with jax.enable_x64(True):
        model = build_transformer(model_config, VOCABULARY)
        step = jax.jit(TrainStep(model, train))
        state = init_state(model, train)
        losses = []
        for _ in range(STEPS):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics.loss.smoothed))
        expected = train_by_table_8(model_config, train, table_8_init(model_config))
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert abs(np.diff(losses)).min() > 0.1


def test_at_the_base_width_the_programs_are_the_papers() -> None:
    model = build_transformer(SMALL.model, VOCABULARY)
    programs = []
    for base_width in (None, SMALL.model.d_model):
        train = replace(SMALL.train, base_width=base_width)
        init = jax.make_jaxpr(partial(init_state, model, train))
        state = jax.eval_shape(partial(init_state, model, train))
        programs.append(f"{init()} {jax.make_jaxpr(TrainStep(model, train))(state, BATCH)}")
    assert programs[0] == programs[1]


def test_scores_depend_on_the_size_of_heads_and_not_on_their_number() -> None:
    model = replace(SMALL.model, d_model=32, d_k=16)
    assert width_factors(TrainConfig(base_width=16), model)["query_matrix"].initial == 0.5**0.5
    model = replace(SMALL.model, d_model=32, num_heads=4, d_k=8)
    factors = width_factors(TrainConfig(base_width=16, base_d_k=8), model)
    assert factors["query_matrix"] == factors["matrix"] == Factors(1, 0.5)
