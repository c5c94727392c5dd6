"""Adam (section 5.3), other optimizers, and gradient clipping."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int
from optax.contrib import MuonDimensionNumbers, ScheduleFreeState

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.registry import Registry
from transformer_jax.training.schedule import learning_rate_schedule
from transformer_jax.training.width import parameter_groups, width_factors

MakeOptimizer = Callable[[TrainConfig, optax.Schedule], optax.GradientTransformation]
"""Returns the optimizer for a config and a learning rate. The rate is a function of Optax's count
of previous updates, which is 0 in the first step."""

OPTIMIZERS = Registry[MakeOptimizer]("train.optimizer")


@OPTIMIZERS.register("adam")
def adam(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Adam (Kingma and Ba 2015)."""
    return optax.adam(rate, b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon)


@OPTIMIZERS.register("adamw")
def adamw(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    betas = {"b1": config.adam_beta1, "b2": config.adam_beta2, "eps": config.adam_epsilon}
    return optax.adamw(rate, **betas, weight_decay=config.weight_decay, mask=is_matrix)


@OPTIMIZERS.register("lion")
def lion(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Lion with the constants of Chen et al. (2023)."""
    return optax.lion(rate, b1=0.9, b2=0.99, weight_decay=config.weight_decay, mask=is_matrix)


@OPTIMIZERS.register("adafactor")
def adafactor(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:  # noqa: ARG001
    """Return Adafactor (Shazeer and Stern 2018).

    The learning rate is relative to the root mean square of each parameter.
    """
    return optax.adafactor(rate)


@OPTIMIZERS.register("muon")
def muon(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for the matrices, and Adam for all other parameters (Jordan et al. 2024).

    Updates of matrices have a root mean square of 0.2 times the learning rate (Liu et al. 2025), so
    that the same learning rate works for all parameters.
    """
    matrices = optax.contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=matrix_axes,
        consistent_rms=0.2,
    )

    def labels(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda matrix: "muon" if matrix else "adam", is_matrix(params))

    return optax.partition({"muon": matrices, "adam": adam(config, rate)}, labels)


@OPTIMIZERS.register("schedule_free")
def schedule_free(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Return schedule-free AdamW, which averages its parameters (Defazio et al. 2024)."""
    base = optax.chain(
        # `scale_by_rms` is Adam without its first moment, which the average replaces.
        optax.scale_by_rms(
            config.adam_beta2, config.adam_epsilon, eps_in_sqrt=False, bias_correction=True
        ),
        optax.add_decayed_weights(config.weight_decay, is_matrix),
        optax.scale_by_learning_rate(rate),
    )
    # This wrapper counts from 1, to weight each step's parameters by the learning rate.
    return optax.contrib.schedule_free(base, lambda step: rate(step - 1), b1=config.adam_beta1)


def matrix_axes(params: optax.Params) -> Any:  # noqa: ANN401 - Optax does not declare this type
    """Return the input and output axes of each matrix, and None for all other parameters.

    Matrices are the kernels of linear layers and convolutions. The kernel of an attention
    projection, [D, H, K], is treated as one matrix from D to H K. Similarly, the output projection
    [H, K, D] is treated as a matrix from H K to D, and a convolution [W, I, O] as a matrix from W I
    to O (Jordan et al. 2024). Embeddings, other tables, norms, and biases are not matrices.
    """

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> MuonDimensionNumbers | None:
        *parents, name = (str(getattr(key, "key", key)) for key in path)
        if name != "kernel" or leaf.ndim < 2:
            return None
        inputs = 1 if parents[-1:] in (["query"], ["key"], ["value"]) else leaf.ndim - 1
        return MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, leaf.ndim)))

    return jax.tree.map_with_path(axes, params)


def is_matrix(params: optax.Params) -> Any:  # noqa: ANN401 - Optax does not declare this type
    """Return whether each parameter is a matrix. See `matrix_axes`."""
    return jax.tree.map(
        lambda axes: axes is not None,
        matrix_axes(params),
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )


def clip_by_known_norm(
    max_norm: Float[ArrayLike, ""],
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm` for a known norm, without squaring all gradients again."""

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,  # noqa: ARG001 (Optax's protocol names it)
        **extra_args: Float[Array, ""],
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = jnp.minimum(1, max_norm / extra_args["norm"])
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class MovingAverage(NamedTuple):
    """The state of `track_average`."""

    count: Int[Array, ""]
    """The number of updates so far."""
    params: optax.Params


def track_average(decay: Float[ArrayLike, ""]) -> optax.GradientTransformation:
    """Return a transformation that averages the parameters without changing the updates."""

    def init(params: optax.Params) -> MovingAverage:
        return MovingAverage(jnp.zeros([], jnp.int32), jax.tree.map(jnp.copy, params))

    def update(
        updates: optax.Updates,
        state: Any,  # noqa: ANN401 (Optax's protocol allows any state)
        params: Any = None,  # noqa: ANN401 (Optax's protocol allows None)
    ) -> tuple[optax.Updates, optax.OptState]:
        count = state.count + 1
        step_size = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
        new = optax.apply_updates(params, updates)
        return updates, MovingAverage(count, optax.incremental_update(new, state.params, step_size))

    return optax.GradientTransformation(init, update)


def make_optimizer(
    config: TrainConfig, model: ModelConfig
) -> optax.GradientTransformationExtraArgs:
    """Return the config's optimizer and learning rate, with the configured clipping and average."""
    schedule = learning_rate_schedule(config, model.d_model)

    def rate(count: ArrayLike) -> Float[Array, ""]:
        # Optax counts updates from 0, but the paper counts steps from 1.
        return schedule(jnp.asarray(count) + 1)

    def scale_rate(factor: float) -> optax.GradientTransformation:
        # Parameters decay by a fraction of the unscaled learning rate.
        part = config.with_numbers({"weight_decay": config.weight_decay / factor})
        return OPTIMIZERS[config.optimizer](part, lambda count: factor * rate(count))

    if factors := width_factors(config, model):
        optimizer = optax.partition(
            {name: scale_rate(group.rate) for name, group in factors.items()},
            partial(parameter_groups, model),
        )
    else:
        optimizer = OPTIMIZERS[config.optimizer](config.for_part("optimizer"), rate)
    if config.ema_decay is not None:
        optimizer = optax.chain(optimizer, track_average(config.ema_decay))
    if config.clip_norm is None:
        # The step always passes `norm`, which the optimizer ignores.
        return optax.with_extra_args_support(optimizer)
    return optax.chain(clip_by_known_norm(config.clip_norm), optimizer)


def evaluation_params(params: Params, state: optax.OptState) -> Params:
    """Return the parameters to evaluate: the average in `state` if there is one, or `params`."""

    def is_average(node: object) -> bool:
        return isinstance(node, ScheduleFreeState | MovingAverage)

    average: Any = params
    for node in jax.tree.leaves(state, is_leaf=is_average):
        if isinstance(node, MovingAverage):
            average = node.params
        elif is_average(node):
            average = optax.contrib.schedule_free_eval_params(node, params)
    return average
