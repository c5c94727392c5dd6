"""Perplexity (section 6.1), of a set and of each of its sentences."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.data.batches import Batch, Batches, Ragged
from transformer_jax.model.losses import Loss, cross_entropy
from transformer_jax.model.transformer import Params, Transformer

# Positions of a batch when only the loss is computed.
SCORING_TOKENS = 4096


class SentenceScore(NamedTuple):
    """What a model makes of a reference, given its source."""

    source_tokens: int
    """Its end counted."""
    target_tokens: int
    """Likewise."""
    nll: float
    """Negative log-likelihood of all its pieces, in nats, without label smoothing."""


@functools.partial(jax.jit, static_argnames="model")
def _losses(params: Params, batch: Batch, *, model: Transformer) -> Loss:
    """Return the loss of each row."""
    logits: Any = model.apply({"params": params}, *batch)
    row_loss = functools.partial(cross_entropy, smoothing=0.0)
    return jax.vmap(row_loss)(logits[:, None], batch.target[:, None])


def score_sentences(
    model: Transformer, params: Params, source: Ragged, target: Ragged
) -> list[SentenceScore]:
    """Return what the model makes of each pair, in their order."""
    batches = Batches(source, target, batch_tokens=SCORING_TOKENS, seed=0)
    # All are asked for before any is waited for.
    losses = [_losses(params, batches[i], model=model).nll for i in range(batches.per_epoch)]
    nll = np.zeros(len(target.lengths))
    for step, rows in enumerate(jax.device_get(losses)):
        pairs = batches.pairs(step)
        # Rows past the pairs are empty.
        nll[pairs] = rows[: len(pairs)]
    columns = source.lengths.tolist(), target.lengths.tolist(), nll.tolist()
    return [SentenceScore(*row) for row in zip(*columns, strict=True)]


def perplexity(found: Sequence[SentenceScore]) -> float:
    """Return the perplexity per piece, the end counted, without label smoothing (Table 3)."""
    nll = math.fsum(sentence.nll for sentence in found)
    return math.exp(min(nll / sum(sentence.target_tokens for sentence in found), 700.0))
