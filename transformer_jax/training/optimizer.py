"""Adam and the learning rate that first grows, then falls (section 5.3)."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from transformer_jax.config import TrainConfig


def learning_rate(
    step: ArrayLike, *, d_model: int, warmup_steps: int, factor: float = 1.0
) -> Float[Array, ""]:
    """Return factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3).

    Linear growth up to step `warmup_steps`, where it peaks; inverse square root after.
    `step` counts from 1.
    """
    step = jnp.asarray(step, jnp.float32)
    return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


def make_optimizer(config: TrainConfig, d_model: int) -> optax.GradientTransformation:
    """Return Adam with the paper's learning rate, and clipping where the config asks for it."""

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        # Optax counts updates from 0, the paper from 1.
        step = jnp.asarray(count) + 1
        return learning_rate(
            step,
            d_model=d_model,
            warmup_steps=config.warmup_steps,
            factor=config.rate_factor,
        )

    adam = optax.adam(schedule, b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon)
    if config.clip_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)
