"""Learning-rate schedules, which all begin with a linear warmup (section 5.3).

A schedule maps a step to a learning rate. Steps are numbered from 1, as in the paper.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from transformer_jax.config import TrainConfig
from transformer_jax.registry import Registry

Schedule = Callable[[ArrayLike], Float[Array, ""]]
MakeSchedule = Callable[[TrainConfig, float], Schedule]
"""Returns the schedule for a config and the peak of the learning rate."""

SCHEDULES = Registry[MakeSchedule]("train.schedule")


def learning_rate_schedule(config: TrainConfig, d_model: int) -> Schedule:
    """Return the learning rate as a function of the step, numbered from 1."""
    peak = config.peak_learning_rate
    if peak is None:
        peak = config.learning_rate_scale * d_model**-0.5 * config.warmup_steps**-0.5
    return SCHEDULES[config.schedule](config, peak)


def learning_rate(
    step: ArrayLike, *, d_model: int, warmup_steps: int, scale: float = 1.0
) -> Float[Array, ""]:
    """Return scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3).

    The rate grows linearly, peaks at step `warmup_steps`, and then decays with the inverse square
    root of the step.
    """
    step = jnp.asarray(step, jnp.float32)
    return scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


@SCHEDULES.register("inverse_square_root")
def inverse_square_root(config: TrainConfig, peak: float) -> Schedule:
    """Return the paper's learning rate, with another peak."""
    # With a scale of 1 and a `d_model` of 1, equation 3 peaks at warmup_steps^-0.5.
    scale = peak * config.warmup_steps**0.5
    return partial(learning_rate, d_model=1, warmup_steps=config.warmup_steps, scale=scale)


@SCHEDULES.register("constant")
def constant(config: TrainConfig, peak: float) -> Schedule:
    """Return a schedule that stays at the peak after the warmup."""
    return _after_warmup(config, peak, optax.constant_schedule(1.0))


@SCHEDULES.register("cosine")
def cosine(config: TrainConfig, peak: float) -> Schedule:
    """Return a schedule that decays to 0 along half a cosine (Loshchilov and Hutter 2017)."""
    decay_steps = config.last_decay_step - config.warmup_steps
    return _after_warmup(config, peak, optax.cosine_decay_schedule(1.0, decay_steps))


@SCHEDULES.register("warmup_stable_decay")
def warmup_stable_decay(config: TrainConfig, peak: float) -> Schedule:
    """Return a schedule that stays at the peak and then decays linearly to 0 (Hu et al. 2024)."""
    last = config.last_decay_step - config.warmup_steps
    decay_steps = min(max(round(config.decay_fraction * config.last_decay_step), 1), last)
    parts = [optax.constant_schedule(1.0), optax.linear_schedule(1.0, 0.0, decay_steps)]
    return _after_warmup(config, peak, optax.join_schedules(parts, [last - decay_steps]))


def _after_warmup(config: TrainConfig, peak: float, factor: optax.Schedule) -> Schedule:
    """Return a linear warmup to the peak, followed by the peak times a factor.

    `factor` receives the number of steps since the end of the warmup.
    """
    parts = [optax.linear_schedule(0.0, 1.0, config.warmup_steps), factor]
    relative = optax.join_schedules(parts, [config.warmup_steps])
    return lambda step: peak * jnp.asarray(relative(step))
