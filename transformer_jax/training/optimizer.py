"""Adam and the learning rate that first grows, then falls (section 5.3)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from transformer_jax.config import TrainConfig


def learning_rate(
    step: ArrayLike, *, d_model: int, warmup_steps: int, scale: float = 1.0
) -> Float[Array, ""]:
    """Return factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3).

    Linear growth up to step `warmup_steps`, where it peaks; inverse square root after.
    `step` counts from 1.
    """
    step = jnp.asarray(step, jnp.float32)
    return scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


def clip_by_known_norm(longest: float) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm`, but told the norm: a step has it already."""

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        factor = jnp.minimum(1, longest / extra_args["norm"])
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def make_optimizer(config: TrainConfig, d_model: int) -> optax.GradientTransformationExtraArgs:
    """Return Adam with the paper's learning rate, and clipping where the config asks for it.

    Its update also takes `norm`, of the gradient as a whole.
    """

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        # Optax counts updates from 0, the paper from 1.
        step = jnp.asarray(count) + 1
        return learning_rate(
            step,
            d_model=d_model,
            warmup_steps=config.warmup_steps,
            scale=config.learning_rate_scale,
        )

    adam = optax.adam(schedule, b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon)
    if config.clip_norm is None:
        return optax.with_extra_args_support(adam)
    return optax.chain(clip_by_known_norm(config.clip_norm), adam)
