"""Plots of a run's positional encodings and losses, and of a config's learning rate.

The losses are plotted by position and by sentence length.
Shapes: S sentences, P points.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from transformer_jax.backend import start_backend
from transformer_jax.config import Config
from transformer_jax.config.architectures import uses
from transformer_jax.config.sections import DECAYING_SCHEDULES
from transformer_jax.config.validation import checked
from transformer_jax.data.splits import Split
from transformer_jax.errors import UsageError
from transformer_jax.evaluation.evaluate import prepare_split
from transformer_jax.inference.ensemble import require_single
from transformer_jax.inference.pairs import token_log_probs
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.inspect import initial_position_table, position_table
from transformer_jax.model.positions import sinusoid
from transformer_jax.training.schedule import learning_rate_schedule
from transformer_jax.visualization.plots import Curve, draw_losses, draw_positions, draw_schedules
from transformer_jax.visualization.style import Picture

NUM_POSITIONS = 128
MIN_POSITIONS = 4
# Plot a mean only if it is computed from at least this many sentences.
MIN_SENTENCES = 10
NUM_LENGTHS = 10
# The standard normal quantile for 95% confidence intervals.
QUANTILE = 1.96


@checked
def plot_positions(run: Run, *, num_positions: int | None = None, offset: int = 1) -> Picture:
    """Plot the encoder's positional encodings and the linear map from PE(pos) to PE(pos + offset).

    A learned table is shown next to the paper's sinusoids and the initial table of a run with the
    same seed. `num_positions` defaults to 128, or to the model's maximum if that is smaller.

    Raises:
        UsageError: the run is an ensemble or has no position table, or `num_positions` or `offset`
            is out of range.
    """
    require_single(run)
    config = run.config.model
    if not uses(config, "positions"):
        raise UsageError(
            f"{run.folder.path} has no positional encodings: its model.architecture is "
            f"{config.architecture}, which reads one token at a time"
        )
    if config.positions == "none":
        raise UsageError(f"{run.folder.path} does not encode positions (model.positions none)")
    if config.positions_replace_attention:
        raise UsageError(
            f"{run.folder.path} has no table of positions: with model.positions "
            f"{config.positions}, positions act within self-attention"
        )
    is_bounded = config.positions == "learned"
    longest = config.max_positions_per_stack[0] if is_bounded else config.max_length
    count = min(longest, NUM_POSITIONS) if num_positions is None else num_positions
    if not MIN_POSITIONS <= count <= longest:
        raise UsageError(
            f"the number of positions must be from {MIN_POSITIONS} to {longest} for "
            f"{run.folder.path}, got {count}"
        )
    if not 1 <= offset <= count // 2:
        raise UsageError(
            f"the offset must be from 1 to {count // 2}, half the number of positions, got {offset}"
        )
    trained = np.asarray(position_table(run.model, run.params, count))
    if not is_bounded:
        return draw_positions({config.positions.replace("_", " "): trained}, offset=offset)
    seed = run.config.train.seed
    tables = {
        "learned, before training": np.asarray(initial_position_table(run.model, seed, count)),
        "learned, after training": trained,
    }
    if config.d_model % 2 == 0:
        sinusoids = np.asarray(sinusoid(jnp.arange(count), config.d_model))
        tables = {"sinusoids": sinusoids, **tables}
    return draw_positions(tables, offset=offset)


@checked
def plot_losses(run: Run, *, split: Split = "dev") -> Picture:
    """Plot how the loss on a split depends on the target position and on the target length.

    Bands are 95% confidence intervals over sentences. Positions reached by fewer than 10 sentences
    are omitted. Lengths are grouped into up to ten bins, each with about the same number of
    sentences.

    Raises:
        UsageError: the run does not have this split, or the split has fewer than 10 sentences.
        DataError: the run's text has changed.
    """
    prepared = prepare_split(run, split)
    log_probs = token_log_probs(run.model, run.params, prepared.tokens(split))
    losses = [-x for x in log_probs]
    if len(losses) < MIN_SENTENCES:
        raise UsageError(
            f"the {split} set of {run.folder.path} has {len(losses)} sentences, but the "
            f"plot needs at least {MIN_SENTENCES}"
        )
    return draw_losses(loss_by_position(split, losses), loss_by_length(split, losses))


def loss_by_position(label: str, losses: Sequence[Float[np.ndarray, " _"]]) -> Curve:
    """Return the mean token loss at each position. Positions are numbered from 1."""
    lengths = np.array([len(x) for x in losses])
    points: list[tuple[float, ...]] = []
    for position in range(lengths.max()):
        values = np.array([x[position] for x in losses if len(x) > position], float)
        if len(values) < MIN_SENTENCES:
            break
        half = QUANTILE * float(values.std(ddof=1)) / math.sqrt(len(values))
        mean = float(values.mean())
        points.append((position + 1, mean, mean - half, mean + half))
    return Curve(label, *np.array(points).T)


def loss_by_length(label: str, losses: Sequence[Float[np.ndarray, " _"]]) -> Curve:
    """Return the loss per token for each group of sentences of similar length."""
    lengths = np.array([len(x) for x in losses])
    totals = np.array([x.sum(dtype=float) for x in losses])
    points: list[tuple[float, ...]] = []
    for group in _group_lengths(lengths):
        n, total = lengths[group], totals[group]
        mean = float(total.sum() / n.sum())
        # The confidence interval uses the standard error of the ratio of two sums.
        errors = total - mean * n
        half = QUANTILE * float(errors.std(ddof=1)) / (float(n.mean()) * math.sqrt(len(n)))
        points.append((float(n.mean()), mean, mean - half, mean + half))
    return Curve(label, *np.array(points).T)


def _group_lengths(lengths: Int[np.ndarray, " S"]) -> list[Int[np.ndarray, " group"]]:
    """Return the sentence indices of each group; sentences of equal length share a group."""
    order = np.argsort(lengths, kind="stable")
    size = max(MIN_SENTENCES, math.ceil(len(lengths) / NUM_LENGTHS))
    groups: list[list[int]] = [[]]
    for previous, index in zip([order[0], *order[:-1]], order, strict=True):
        if len(groups[-1]) >= size and lengths[index] > lengths[previous]:
            groups.append([])
        groups[-1].append(int(index))
    if len(groups) > 1 and len(groups[-1]) < MIN_SENTENCES:
        last = groups.pop()
        groups[-1] += last
    return [np.array(group) for group in groups]


# The plot shows the config's `d_model` and `warmup_steps` multiplied by each of these factors.
FACTORS = (1, 0.25, 0.5, 2)
NUM_POINTS = 400


@checked
def plot_schedule(config: Config) -> Picture:
    """Plot a config's learning rate by step, for several model widths and warmup lengths.

    Raises:
        BackendError: JAX cannot start.
    """
    start_backend()
    d_model, train = config.model.d_model, config.train
    steps = np.unique(np.linspace(1, max(train.steps, 2), NUM_POINTS).astype(int))
    # Include the steps at which the rates peak.
    warmups = _scale_by_factors(train.warmup_steps)
    steps = np.union1d(steps, [warmup for warmup in warmups if warmup <= train.steps])

    def rate(width: int, warmup: int) -> Float[np.ndarray, " P"]:
        schedule = learning_rate_schedule(replace(train, warmup_steps=warmup), width)
        return np.asarray(jax.vmap(schedule)(steps))

    by_width = {f"d_model {n:,}": rate(n, train.warmup_steps) for n in _scale_by_factors(d_model)}
    # A schedule that decays to 0 needs a shorter warmup.
    last = train.last_decay_step if train.schedule in DECAYING_SCHEDULES else math.inf
    by_warmup = {f"warmup {n:,}": rate(d_model, n) for n in warmups if n < last}
    panels = {
        f"Warmup of {train.warmup_steps:,} steps": by_width,
        f"d_model {d_model:,}": by_warmup,
    }
    # The width does not affect these learning rates.
    if train.base_width is not None:
        panels = {f"Tuned for d_model {train.base_width:,}": by_warmup}
    if train.peak_learning_rate is not None:
        panels = {f"Peak at {train.peak_learning_rate:g}": by_warmup}
    return draw_schedules(steps, panels)


def _scale_by_factors(value: int) -> Iterable[int]:
    """Return the value times each factor, rounded to a positive integer, without duplicates."""
    return dict.fromkeys(max(1, round(value * factor)) for factor in FACTORS)
