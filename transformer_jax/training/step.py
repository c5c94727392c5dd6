"""One update of the parameters: a pure function of the state and a batch.

This module does not depend on how many devices share a batch. `training.sharding` provides a
function that computes the gradients on all devices and adds their sums.
Shapes: B rows in the batch, T token positions, M micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from transformer_jax.backend import host_device
from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params, init_params, make_rng
from transformer_jax.model.losses import LOSSES, Loss
from transformer_jax.model.target_platform import target_platform
from transformer_jax.training.optimizer import evaluation_params, make_optimizer
from transformer_jax.training.width import scale_initial

Tree = TypeVar("Tree")


class TrainState(NamedTuple):
    """The input and output of a step. The state, config, and data determine all later steps."""

    step: Int[Array, ""]
    """The number of batches that training has processed, including those of skipped steps."""
    seed: Int[Array, ""]
    """The run's seed, an array so that runs with different seeds share a program."""
    params: Params
    opt_state: optax.OptState
    skipped: Int[Array, ""]
    """The number of steps that were skipped because the gradient or loss was not finite."""
    skipped_in_a_row: Int[Array, ""]

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate and to store, which are `params` for most optimizers."""
        return evaluation_params(self.params, self.opt_state)


class Numbers(NamedTuple):
    """The numeric settings in a config that a compiled step takes as arguments, keyed by field."""

    model: Mapping[str, ArrayLike]
    train: Mapping[str, ArrayLike]


class StepMetrics(NamedTuple):
    """The metrics of one step."""

    loss: Loss
    """All fields are zero if the step was skipped."""
    gradient_norm: Float[Array, ""]
    """The global norm of the gradient, before clipping."""
    skipped: Int[Array, ""]
    """The number of skipped steps so far, as in the new `TrainState`."""
    skipped_in_a_row: Int[Array, ""]


GradientSum = tuple[Params, Loss]
"""The gradient of `Loss.smoothed`, summed over target tokens, and the `Loss` itself."""
ComputeGradients = Callable[["TrainStep", TrainState, Batch], GradientSum]
"""A function of (step, state, batch) that returns the sums over the whole batch."""


def _sum_loss(
    model: EncoderDecoder, config: TrainConfig, params: Params, batch: Batch, rng: Array
) -> tuple[Float[Array, ""], Loss]:
    """Return the loss that training minimizes, summed over target tokens, and the whole `Loss`.

    The loss includes the values that modules recorded in the collection "losses", once per token.
    """
    # Flax does not declare the type of the result.
    result: Any = model.apply(
        {"params": params}, *batch, train=True, rngs={"dropout": rng}, mutable=["losses"]
    )
    logits, recorded = result
    loss = LOSSES[config.loss](logits, batch.target, config.for_part("loss"))
    for value in jax.tree.leaves(recorded):
        loss = loss._replace(smoothed=loss.smoothed + loss.count * value)
    return loss.smoothed, loss


@dataclass(frozen=True)
class TrainStep:
    """A step that applies the optimizer to the mean gradient per token (sections 5.3 and 5.4)."""

    model: EncoderDecoder
    config: TrainConfig

    def make_numbers(self) -> Numbers:
        """Return the config's numeric settings as arrays.

        The dropout rates remain constants if the config selects a part of the model from outside
        this package, because the part might need Python floats. See `ConfigSection.for_part`.
        """
        model = self.model.config
        numbers = Numbers({} if model.has_foreign_part else model.numbers(), self.config.numbers())
        # NumPy converts the values, because JAX would compile a program for the conversion.
        return jax.tree.map(lambda x: jax.device_put(np.float32(x)), numbers)

    def with_numbers(self, numbers: Numbers) -> "TrainStep":
        """Return a step with other numeric settings, such as traced arguments of a program."""
        model = self.model.clone(config=self.model.config.with_numbers(numbers.model))
        return replace(self, model=model, config=self.config.with_numbers(numbers.train))

    def __call__(
        self, state: TrainState, batch: Batch, compute: ComputeGradients | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Update the state with a batch's gradient, which `compute` can distribute over devices."""
        sums = compute(self, state, batch) if compute else self.compute_gradients(state, batch)
        return self.apply_gradients(state, sums)

    def compute_gradients(self, state: TrainState, batch: Batch) -> GradientSum:
        """Compute the gradient and loss sums over a batch, or over one device's rows in the batch.

        This method splits the rows into `gradient_accumulation_steps` micro-batches.
        """
        # Derive dropout masks from the seed and the step, so that a resumed run draws the same
        # masks. The second `fold_in` is only for compatibility: without it, existing runs could not
        # be resumed and reproduced exactly.
        rng = jax.random.fold_in(jax.random.fold_in(make_rng(state.seed), state.step), 0)
        num_micro_batches = self.config.gradient_accumulation_steps
        # This function maps (params, batch, rng) to a `GradientSum`.
        gradient_of_sum = jax.grad(partial(_sum_loss, self.model, self.config), has_aux=True)
        if num_micro_batches == 1:
            return gradient_of_sum(state.params, batch, rng)

        def add(total: GradientSum, inputs: tuple[Batch, Array]) -> tuple[GradientSum, None]:
            return jax.tree.map(jnp.add, total, gradient_of_sum(state.params, *inputs)), None

        rngs = jax.random.split(rng, num_micro_batches)
        zeros = (jax.tree.map(jnp.zeros_like, state.params), Loss(*jnp.zeros(3)))
        total, _ = jax.lax.scan(add, zeros, (split_rows(batch, num_micro_batches), rngs))
        return total

    def apply_gradients(
        self, state: TrainState, sums: GradientSum
    ) -> tuple[TrainState, StepMetrics]:
        """Update the state with the mean gradient per token, given the sums over the whole batch.

        If the gradient or the loss is not finite, skip the update and count the step as skipped.
        The paper specifies neither the mean over tokens nor the skipping.
        """
        gradients, loss = sums
        gradients = jax.tree.map(lambda g: g / jnp.maximum(loss.count, 1), gradients)
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss.smoothed)
        optimizer = make_optimizer(self.config, self.model.config)

        def update() -> tuple[optax.Params, optax.OptState]:
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, state.params, norm=norm
            )
            return optax.apply_updates(state.params, updates), opt_state

        params, opt_state = update_if(is_finite, update, (state.params, state.opt_state))
        skipped = state.skipped + jnp.where(is_finite, 0, 1)
        in_a_row = jnp.where(is_finite, 0, state.skipped_in_a_row + 1)
        new_state = TrainState(state.step + 1, state.seed, params, opt_state, skipped, in_a_row)
        loss = jax.tree.map(lambda x: jnp.where(is_finite, x, 0), loss)
        return new_state, StepMetrics(loss, norm, skipped, in_a_row)


def init_state(
    model: EncoderDecoder, config: TrainConfig, params: Params | None = None
) -> TrainState:
    """Return the initial state; `params` defaults to random values for the config's seed.

    A single program computes the state on the host's CPU, so that the initial parameters are the
    same on all platforms. All seeds share this program.
    """
    with jax.default_device(host_device()):
        return _init_state(model, replace(config, seed=0), np.int32(config.seed), params)


@partial(jax.jit, static_argnums=(0, 1))
def _init_state(
    model: EncoderDecoder, config: TrainConfig, seed: Int[Array, ""], params: Params | None
) -> TrainState:
    if params is None:
        params = scale_initial(config, model.config, init_params(model, make_rng(seed)))
    opt_state = make_optimizer(config, model.config).init(params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, seed, params, opt_state, zero, zero)


def split_rows(batch: Batch, num_micro_batches: int) -> Batch:
    """Split a batch into M micro-batches: [B, T] becomes [M, ceil(B / M), T].

    Row i goes to micro-batch i % M. If M divides the number of rows on each device, the
    micro-batches are the same for any number of devices. For example, let M = 2. A single device
    splits 8 rows into (0, 2, 4, 6) and (1, 3, 5, 7). If there are two devices, the first splits
    rows 0-3 into (0, 2) and (1, 3), and the second splits rows 4-7 into (4, 6) and (5, 7).
    Each device has consecutive rows of both micro-batches, as `drawing_for_shard` requires.

    If B is not divisible by M, the last rows of some micro-batches are empty. Empty rows add
    nothing to any sum.
    """

    def split(tokens: Int[Array, "B T"]) -> Int[Array, "M rows T"]:
        padded = jnp.pad(tokens, ((0, -len(tokens) % num_micro_batches), (0, 0)))
        return padded.reshape(-1, num_micro_batches, tokens.shape[1]).swapaxes(0, 1)

    return Batch(*map(split, batch))


def update_if(condition: Bool[Array, ""], update: Callable[[], Any], old: Tree) -> Tree:
    """Return the result of `update` if the condition is true, and otherwise the old arrays.

    On a CPU, `jnp.where` would make XLA copy Adam's old moments, because XLA overwrites the moments
    before it uses them to compute the new parameters. On a GPU, `cond` would copy the state. On a
    TPU, `cond` would keep XLA from fusing the update with the gradients.
    """
    if target_platform() == "cpu":
        return jax.lax.cond(condition, update, lambda: old)
    return jax.tree.map(partial(jnp.where, condition), update(), old)
