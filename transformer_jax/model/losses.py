"""The loss with label smoothing (section 5.4) and the sums for perplexity (section 6.2).

The caller divides the sums by the counts, because a mean of means would give short batches too much
weight.
Shapes: B batch, T positions, N vocab_size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.config import TrainConfig
from transformer_jax.model.operations import sum_dtype, summarize
from transformer_jax.registry import Registry
from transformer_jax.special_tokens import PAD


class Loss(NamedTuple):
    """Sums over the tokens in a batch. To combine batches, add their losses field by field."""

    smoothed: Float[Array, ""]
    """The loss that training minimizes, such as the cross-entropy with the smoothed target."""
    nll: Float[Array, ""]
    """The negative log-likelihood of the target tokens, in nats. Perplexity is exp(nll / count)."""
    count: Float[Array, ""]
    """The number of tokens, excluding padding."""


Number = float | Float[Array, ""]
"""A constant, or an argument to a compiled training step."""

LossFunction = Callable[[Float[Array, "B T N"], Int[Array, "B T"], TrainConfig], Loss]
"""A function that returns the loss, given the logits, the target tokens, and the config."""

LOSSES = Registry[LossFunction]("train.loss")


@LOSSES.register("cross_entropy")
def training_cross_entropy(
    logits: Float[Array, "B T N"], target: Int[Array, "B T"], config: TrainConfig
) -> Loss:
    """Compute the cross-entropy with the config's label smoothing and z-loss."""
    smoothing = config.label_smoothing
    if config.label_smoothing_over == "other_tokens":
        smoothing = smoothing_over_other_tokens(smoothing, logits.shape[-1])
    return cross_entropy(logits, target, smoothing, config.z_loss)


def cross_entropy(
    logits: Float[Array, "B T N"],
    target: Int[Array, "B T"],
    smoothing: Number,
    z_loss: Number = 0.0,
) -> Loss:
    """Compute the cross-entropy of predictions, with and without label smoothing (section 5.4).

    The smoothed target spreads probability `smoothing` evenly over all N tokens, including the true
    token. Szegedy et al. (2016), whom the paper cites, smooth the target in the same way. The
    authors' code uses `smoothing_over_other_tokens`. For each token, `smoothed` also includes
    z_loss * (log Z)^2, where Z is the sum of the exponentials of the logits.
    """
    logits = logits.astype(sum_dtype(logits))
    is_real = target != PAD
    log_total, total, target_logit = summarize(logits, target)
    # The smoothed loss is the expected value of -log p = log_total - logit under the smoothed
    # target, which is (1 - smoothing) * one_hot(target) + smoothing / N.
    smoothed = log_total - (1 - smoothing) * target_logit - smoothing * (total / logits.shape[-1])
    if not (isinstance(z_loss, float | int) and z_loss == 0):
        smoothed += z_loss * log_total**2
    return Loss(
        smoothed=jnp.sum(smoothed, where=is_real),
        nll=jnp.sum(log_total - target_logit, where=is_real),
        count=jnp.sum(is_real, dtype=jnp.float32),
    )


def smoothing_over_other_tokens(smoothing: Number, vocab_size: int) -> Number:
    """Return the value to pass to `cross_entropy` so that only the other tokens share `smoothing`.

    As in Tensor2Tensor, the true token then has a target probability of 1 - `smoothing`, and each
    other token has `smoothing` / (N - 1).
    """
    return smoothing * vocab_size / (vocab_size - 1)
