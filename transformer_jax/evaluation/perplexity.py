"""The perplexity of a corpus and the losses of its sentences (section 6.2).

Shapes: B sentences in a batch.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from transformer_jax import progress
from transformer_jax.backend import standard_settings
from transformer_jax.config import TrainConfig
from transformer_jax.data.batches import Batch, Batches, Ragged
from transformer_jax.model.encoder_decoder import EncoderDecoder, Params
from transformer_jax.model.losses import LOSSES, Loss, cross_entropy

# The maximum number of source or target tokens in a batch, including padding.
SCORING_TOKENS = 4096
NUM_AHEAD = 4
# Each shape is one compiled program. Scoring is short, so compiling more shapes would take longer
# than the reduced padding saves.
MAX_SHAPES = 4


class SentenceScore(NamedTuple):
    """How well a model predicts one reference. Token counts include the end-of-sentence token."""

    source_tokens: int
    target_tokens: int
    nll: float
    """The negative log-likelihood of the reference in nats, without label smoothing."""


@functools.partial(jax.jit, static_argnames=("model", "config"))
def _losses(
    params: Params, batch: Batch, *, model: EncoderDecoder, config: TrainConfig | None = None
) -> tuple[Float[Array, " B"], Loss | None]:
    """Return the negative log-likelihood of each sentence, and the training loss of the batch."""
    logits: Any = model.apply({"params": params}, *batch)
    sentence_loss = functools.partial(cross_entropy, smoothing=0.0)
    nll = jax.vmap(sentence_loss)(logits[:, None], batch.target[:, None]).nll
    return nll, None if config is None else LOSSES[config.loss](logits, batch.target, config)


def scoring_batches(source: Ragged, target: Ragged) -> Batches:
    """Group the pairs into batches, which can be scored with any number of models."""
    sizes = {"batch_tokens": SCORING_TOKENS, "max_shapes": MAX_SHAPES}
    return Batches(source, target, seed=0, **sizes)


def score_sentences(model: EncoderDecoder, params: Params, batches: Batches) -> list[SentenceScore]:
    """Return the scores of all pairs, in order.

    Before each batch, this function and `score_with_loss` call the current task's reporter (see
    `progress.task`), which can end the computation by raising an exception.
    """
    return _collect(batches, [nll for nll, _ in _run_batches(model, params, batches, None)])


def score_with_loss(
    model: EncoderDecoder, params: Params, batches: Batches, config: TrainConfig
) -> tuple[list[SentenceScore], float]:
    """Return the scores of all pairs, and the training loss per token without dropout."""
    if config.loss == "cross_entropy":
        # Configs that differ only in other fields share the compiled programs.
        fields = ("label_smoothing", "label_smoothing_over", "z_loss")
        config = TrainConfig(**{name: getattr(config, name) for name in fields})
    losses = _run_batches(model, params, batches, config)
    totals = jax.device_get([loss for _, loss in losses if loss is not None])
    smoothed = math.fsum(float(loss.smoothed) for loss in totals)
    tokens = math.fsum(float(loss.count) for loss in totals)
    return _collect(batches, [nll for nll, _ in losses]), smoothed / tokens


def _run_batches(
    model: EncoderDecoder, params: Params, batches: Batches, config: TrainConfig | None
) -> list[tuple[Float[Array, " B"], Loss | None]]:
    losses: list[tuple[Float[Array, " B"], Loss | None]] = []
    for step in range(batches.per_epoch):
        progress.advance(0)
        with standard_settings(model.config.dtype):
            losses.append(_losses(params, batches[step], model=model, config=config))
        # Let the host run only a few batches ahead of the device.
        jax.block_until_ready(losses[max(0, step - NUM_AHEAD)])
    return losses


def _collect(batches: Batches, losses: Sequence[Float[Array, " _"]]) -> list[SentenceScore]:
    """Return the scores of all pairs, in order, given the losses of each batch."""
    lengths = batches.source.lengths.tolist(), batches.target.lengths.tolist()
    nll = np.zeros(len(lengths[0]))
    for step, batch_nll in enumerate(jax.device_get(losses)):
        pairs = batches.pairs(step)
        # The rows after the last pair are padding.
        nll[pairs] = batch_nll[: len(pairs)]
    return [SentenceScore(*values) for values in zip(*lengths, nll.tolist(), strict=True)]


def perplexity(sentences: Sequence[SentenceScore]) -> float:
    """Return the perplexity per token (Table 3), counting end-of-sentence tokens; at most e^700."""
    nll = math.fsum(sentence.nll for sentence in sentences)
    return math.exp(min(nll / sum(sentence.target_tokens for sentence in sentences), 700.0))
