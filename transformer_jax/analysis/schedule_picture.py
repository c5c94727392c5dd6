"""A plot of the learning rate by step, for several model widths and warmup lengths (section 5.3).

Shapes: P points.
"""

from collections.abc import Iterable
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Float

from transformer_jax.config import Config
from transformer_jax.training.optimizer import learning_rate_schedule
from transformer_jax.visualization.schedule import draw_schedules
from transformer_jax.visualization.style import Picture

# The plot shows the config's `d_model` and `warmup_steps` multiplied by each of these factors.
FACTORS = (1, 0.25, 0.5, 2)
NUM_POINTS = 400


def plot_schedule(config: Config) -> Picture:
    """Plot a config's learning rate by step, for several model widths and warmup lengths."""
    d_model, train = config.model.d_model, config.train
    steps = np.unique(np.linspace(1, max(train.steps, 2), NUM_POINTS).astype(int))
    # Include the steps at which the rates peak.
    steps = np.union1d(
        steps, [w for w in _scale_by_factors(train.warmup_steps) if w <= train.steps]
    )

    def rate(width: int, warmup: int) -> Float[np.ndarray, " P"]:
        schedule = learning_rate_schedule(replace(train, warmup_steps=warmup), width)
        return np.asarray(jax.vmap(schedule)(steps))

    by_width = {f"d_model {n:,}": rate(n, train.warmup_steps) for n in _scale_by_factors(d_model)}
    by_warmup = {f"warmup {n:,}": rate(d_model, n) for n in _scale_by_factors(train.warmup_steps)}
    warmup = f"Warmup of {train.warmup_steps:,} steps"
    return draw_schedules(steps, {warmup: by_width, f"d_model {d_model:,}": by_warmup})


def _scale_by_factors(value: int) -> Iterable[int]:
    """Return the value times each factor, rounded to a positive integer, without duplicates."""
    return dict.fromkeys(max(1, round(value * factor)) for factor in FACTORS)
