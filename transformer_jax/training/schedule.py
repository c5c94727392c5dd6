"""Learning rates by step, counted from 1, with a linear warmup at the start (section 5.3)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from transformer_jax.config import TrainConfig
from transformer_jax.registry import Registry

Schedule = Callable[[ArrayLike], Float[Array, ""]]
Peak = float | Float[Array, ""]
"""The maximum learning rate. A part from outside this package receives a float."""
MakeSchedule = Callable[[TrainConfig, Any], Schedule]
"""Returns the schedule for a config and the peak of the learning rate."""

SCHEDULES = Registry[MakeSchedule]("train.schedule")


def learning_rate_schedule(config: TrainConfig, d_model: int) -> Schedule:
    """Return the learning rate as a function of the step, numbered from 1."""
    config = config.for_part("schedule")
    peak = config.peak_learning_rate
    if peak is None:
        width = config.base_width or d_model
        peak = config.learning_rate_scale * width**-0.5 * config.warmup_steps**-0.5
    return SCHEDULES[config.schedule](config, peak)


def learning_rate(
    step: ArrayLike, *, d_model: int, warmup_steps: ArrayLike, scale: ArrayLike = 1.0
) -> Float[Array, ""]:
    """Return scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3).

    The rate grows linearly, peaks at step `warmup_steps`, and then decays with the inverse square
    root of the step.
    """
    step = jnp.asarray(step, jnp.float32)
    return scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


@SCHEDULES.register("inverse_square_root")
def inverse_square_root(config: TrainConfig, peak: Peak) -> Schedule:
    """Return the paper's schedule, scaled to the given peak."""
    # With a scale of 1 and a `d_model` of 1, equation 3 peaks at warmup_steps^-0.5.
    scale = peak * config.warmup_steps**0.5
    return partial(learning_rate, d_model=1, warmup_steps=config.warmup_steps, scale=scale)


@SCHEDULES.register("constant")
def constant(config: TrainConfig, peak: Peak) -> Schedule:
    """Return a schedule that stays at the peak after the warmup."""
    return lambda step: peak * _passed(step, 0, config.warmup_steps)


@SCHEDULES.register("cosine")
def cosine(config: TrainConfig, peak: Peak) -> Schedule:
    """Return a schedule that decays to 0 along half a cosine (Loshchilov and Hutter 2017)."""
    start, last = config.warmup_steps, config.last_decay_step

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        factor = 0.5 * (1 + jnp.cos(jnp.pi * _passed(step, start, last)))
        return peak * jnp.minimum(_passed(step, 0, start), factor)

    return schedule


@SCHEDULES.register("warmup_stable_decay")
def warmup_stable_decay(config: TrainConfig, peak: Peak) -> Schedule:
    """Return a schedule that stays at the peak and then decays linearly to 0 (Hu et al. 2024)."""
    warmup, last = config.warmup_steps, config.last_decay_step
    num_steps = jnp.clip(jnp.round(config.decay_fraction * last), 1, last - warmup)

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        factor = 1 - _passed(step, last - num_steps, last)
        return peak * jnp.minimum(_passed(step, 0, warmup), factor)

    return schedule


def _passed(step: ArrayLike, first: ArrayLike, last: ArrayLike) -> Float[Array, ""]:
    """Return the fraction of the steps from `first` to `last` that have passed, from 0 to 1."""
    step, first, last = (jnp.asarray(x, jnp.float32) for x in (step, first, last))
    return jnp.clip((step - first) / (last - first), 0, 1)
