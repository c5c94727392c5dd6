"""Adam, and a learning rate that rises linearly and then decays (section 5.3)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from transformer_jax.config import TrainConfig


def learning_rate(
    step: ArrayLike, *, d_model: int, warmup_steps: int, scale: float = 1.0
) -> Float[Array, ""]:
    """Return scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3).

    The rate grows linearly, peaks at step `warmup_steps`, and then decays with the inverse square
    root of the step. Steps are numbered from 1.
    """
    step = jnp.asarray(step, jnp.float32)
    return scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


def learning_rate_schedule(
    config: TrainConfig, d_model: int
) -> Callable[[ArrayLike], Float[Array, ""]]:
    """Return the learning rate as a function of the step, with the config's warmup and scale."""
    scale = config.learning_rate_scale
    return partial(learning_rate, d_model=d_model, warmup_steps=config.warmup_steps, scale=scale)


def clip_by_known_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return a variant of `optax.clip_by_global_norm` that takes the norm as an argument.

    The step has already computed the norm, and recomputing it would square all gradients again.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,  # noqa: ARG001 (Optax's protocol names it)
        **extra_args: Float[Array, ""],
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = jnp.minimum(1, max_norm / extra_args["norm"])
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def make_optimizer(config: TrainConfig, d_model: int) -> optax.GradientTransformationExtraArgs:
    """Return Adam with the paper's learning rate, preceded by gradient clipping if configured."""
    rate = learning_rate_schedule(config, d_model)
    adam = optax.adam(
        # Optax counts updates from 0, but the paper counts steps from 1.
        lambda count: rate(jnp.asarray(count) + 1),
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
    )
    if config.clip_norm is None:
        # The step always passes `norm`, which Adam ignores.
        return optax.with_extra_args_support(adam)
    return optax.chain(clip_by_known_norm(config.clip_norm), adam)
