"""One update of the parameters: a pure function of the state and a batch.

The batch is the global one: nothing here knows on how many devices it lies.
Shapes: B batch, S source positions, T target positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.losses import Loss, cross_entropy
from transformer_jax.model.transformer import Params, Transformer, init_params
from transformer_jax.training.optimizer import make_optimizer


class TrainState(NamedTuple):
    """All that a step needs beside its batch: with config and data it determines what follows."""

    step: Int[Array, ""]
    """Batches that training has seen."""
    seed: Int[Array, ""]
    """Of the run. It stays as it is, and is no constant of the step: runs of all seeds share one
    compiled program."""
    params: Params
    optimizer: Any
    """As Optax keeps it."""
    skipped: Int[Array, ""]
    """Of the steps, those that changed nothing since their gradient was not finite."""
    skipped_in_a_row: Int[Array, ""]
    """The last so many were."""


class StepMetrics(NamedTuple):
    """What one step reports."""

    loss: Loss
    """Zeros, of no tokens, where the step was skipped."""
    gradient_norm: Float[Array, ""]
    """Before clipping."""
    skipped: Int[Array, ""]
    """As in the state after the step."""
    skipped_in_a_row: Int[Array, ""]


Sums = tuple[Params, Loss]
"""The gradient of the summed loss, and the sums."""


@dataclass(frozen=True)
class TrainStep:
    """One update in two pure functions, between which sums of several devices can be added."""

    sums: Callable[[TrainState, Batch, Array], Sums]
    """Of a batch, or of a part of it. The last argument is the part's number: each has dropout
    masks of its own."""
    update: Callable[[TrainState, Sums], tuple[TrainState, StepMetrics]]
    """The state after the step, of the sums of the whole batch."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Do a step with a whole batch."""
        return self.update(state, self.sums(state, batch, jnp.int32(0)))


def seed_key(seed: Int[Array, ""]) -> Array:
    """Return the key of a run, of one generator whatever JAX is set to."""
    return jax.random.key(seed, impl="threefry2x32")


def init_state(model: Transformer, config: TrainConfig) -> TrainState:
    """Return the state before the first step: a function of the seed."""
    seed = jnp.int32(config.seed)
    params = init_params(model, seed_key(seed))
    optimizer = make_optimizer(config, model.config.d_model).init(params)
    # Three arrays, for the step may give the memory of each to another.
    step, skipped, in_a_row = jnp.zeros(3, jnp.int32)
    return TrainState(step, seed, params, optimizer, skipped, in_a_row)


def split_rows(batch: Batch, parts: int) -> Batch:
    """Deal a batch's rows out to `parts` gradient-accumulation-steps: [B, T] becomes [parts, B / parts, T].

    Row i goes to part i % parts, so that rows stay on the device that holds them. Rows that
    do not divide are filled up with empty ones, which count nothing.
    """

    def split(pieces: Int[Array, "B T"]) -> Int[Array, "parts rows T"]:
        padded = jnp.pad(pieces, ((0, -len(pieces) % parts), (0, 0)))
        return padded.reshape(-1, parts, pieces.shape[1]).swapaxes(0, 1)

    return Batch(*map(split, batch))


def make_train_step(model: Transformer, config: TrainConfig) -> TrainStep:
    """Return the step: gradient of the mean loss per token, then Adam (sections 5.3, 5.4).

    A gradient that is not finite changes nothing but the count of such steps.
    """
    optimizer = make_optimizer(config, model.config.d_model)

    def total_loss(params: Params, batch: Batch, rng: Array) -> tuple[Float[Array, ""], Loss]:
        logits: Any = model.apply({"params": params}, *batch, train=True, rngs={"dropout": rng})
        loss = cross_entropy(logits, batch.target, config.label_smoothing)
        return loss.smoothed, loss

    def gradient_sum(params: Params, batch: Batch, rng: Array) -> Sums:
        return jax.grad(total_loss, has_aux=True)(params, batch, rng)

    def accumulated(params: Params, batch: Batch, rng: Array) -> Sums:
        rngs = jax.random.split(rng, config.gradient_accumulation_steps)
        parts = split_rows(batch, config.gradient_accumulation_steps)

        def add(total: Sums, part: tuple[Batch, Array]) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, total, gradient_sum(params, *part)), None

        zero = (jax.tree.map(jnp.zeros_like, params), Loss(*jnp.zeros(3)))
        total, _ = jax.lax.scan(add, zero, (parts, rngs))
        return total

    def sums(state: TrainState, batch: Batch, part: Array) -> Sums:
        # Dropout is a function of (seed, step): a run that was resumed draws the same masks.
        rng = jax.random.fold_in(jax.random.fold_in(seed_key(state.seed), state.step), part)
        of_batch = gradient_sum if config.gradient_accumulation_steps == 1 else accumulated
        return of_batch(state.params, batch, rng)

    def update(state: TrainState, sums: Sums) -> tuple[TrainState, StepMetrics]:
        gradients, loss = sums
        gradients = jax.tree.map(lambda g: g / jnp.maximum(loss.count, 1), gradients)
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss.smoothed)

        def updated() -> tuple[Params, Any]:
            updates, new = optimizer.update(gradients, state.optimizer, state.params, norm=norm)
            params: Any = optax.apply_updates(state.params, updates)
            return params, new

        # `jnp.where` between old and new numbers would have XLA on a CPU copy Adam's moments: the
        # new parameters would read the old ones after these are written over.
        new_params, new_optimizer = jax.lax.cond(
            is_finite, updated, lambda: (state.params, state.optimizer)
        )
        new = TrainState(
            state.step + 1,
            state.seed,
            new_params,
            new_optimizer,
            state.skipped + ~is_finite,
            jnp.where(is_finite, 0, state.skipped_in_a_row + 1),
        )
        loss = jax.tree.map(lambda x: jnp.where(is_finite, x, 0), loss)
        return new, StepMetrics(loss, norm, new.skipped, new.skipped_in_a_row)

    return TrainStep(sums, update)
