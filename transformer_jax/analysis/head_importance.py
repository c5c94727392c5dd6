"""Measure which attention heads matter: mask each head alone, and then mask many heads together.

Michel et al. (2019) found that many heads can be removed from a trained model. `model.head_mask`
masks heads by zeroing parameters, so all masks share one compiled program.

Shapes: L layers, H heads per layer, P numbers of masked heads (0, 1, 2, ...).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from transformer_jax import progress
from transformer_jax.data.splits import Split
from transformer_jax.errors import Setting, UsageError
from transformer_jax.evaluation.evaluate import prepare_split
from transformer_jax.evaluation.perplexity import score_sentences, scoring_batches
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.head_mask import KINDS, mask_heads
from transformer_jax.visualization.attention_figures import draw_heads
from transformer_jax.visualization.style import Picture

NUM_SENTENCES = 256
MARGIN = 0.05


class Head(NamedTuple):
    """An attention head. Layers and heads are numbered from 0."""

    kind: str
    """The kind of attention: one of `KINDS`."""
    layer: int
    head: int


@dataclass(frozen=True, eq=False)
class HeadImportance:
    """A run's losses with masked heads, in nats per target token."""

    loss: float
    """The loss with all heads enabled."""
    masked_losses: Float[np.ndarray, "3 L H"]
    """The loss with a single head masked. The axes are the kind of attention (in the order of
    `KINDS`), the layer, and the head."""
    pruned_losses: Float[np.ndarray, " P"]
    """The loss with the first 0, 1, 2, ... heads in `order` masked. The array ends with the first
    loss above `loss` + `margin`, or with the loss when all heads are masked."""
    margin: float
    """The acceptable increase in loss."""

    @property
    def order(self) -> list[Head]:
        """All heads, in ascending order of the loss with only that head masked."""
        flat = np.argsort(self.masked_losses, axis=None, kind="stable")
        indices = zip(*np.unravel_index(flat, self.masked_losses.shape), strict=True)
        return [Head(KINDS[kind], int(layer), int(head)) for kind, layer, head in indices]

    @property
    def num_prunable(self) -> int:
        """The number of heads in `order` that can be masked with an acceptable increase in loss."""
        return int(np.sum(self.pruned_losses <= self.loss + self.margin)) - 1

    def mask(self, num_masked: int) -> Bool[np.ndarray, "3 L H"]:
        """Return a mask for `mask_heads` that disables the first `num_masked` heads in `order`."""
        mask = np.ones(self.masked_losses.shape, bool)
        for kind, layer, head in self.order[:num_masked]:
            mask[KINDS.index(kind), layer, head] = False
        return mask

    def plot(self) -> Picture:
        """Plot a heat map for each kind of attention, and the loss by number of masked heads."""
        increases = dict(zip(KINDS, self.masked_losses - self.loss, strict=True))
        return draw_heads(increases, self.pruned_losses, self.loss + self.margin)


def head_importance(
    run: Run,
    *,
    split: Split = "dev",
    num_sentences: int = NUM_SENTENCES,
    margin: float = MARGIN,
) -> HeadImportance:
    """Compute the loss with masked heads on the first `num_sentences` sentences of a split.

    This function first masks one head at a time. It then masks the heads cumulatively, least
    important first, until the loss exceeds the full model's loss by more than `margin` nats per
    token.

    Raises:
        UsageError: `num_sentences` is not positive, the margin is negative or NaN, the split does
            not exist, the loss is not finite, or `mask_heads` rejects the model.
        DataError: the run's text has changed.
    """
    if num_sentences < 1:
        message = f"the number of sentences must be positive, got {num_sentences}; pass "
        raise UsageError(message, Setting("num_sentences", NUM_SENTENCES))
    # This comparison also rejects NaN.
    if not margin >= 0:
        raise UsageError(
            f"the margin must be at least 0, got {margin}; pass ", Setting("margin", MARGIN)
        )
    config = run.config.model
    shape = (len(KINDS), config.num_layers, config.num_heads)
    # Reject unsupported architectures and stacks of different depths before preparing the text.
    mask_heads(run.params, np.ones(shape, bool))
    tokens = [
        side._replace(offsets=side.offsets[: num_sentences + 1])
        for side in prepare_split(run, split).tokens(split)
    ]
    batches = scoring_batches(*tokens)
    num_heads = math.prod(shape)

    def loss_of(mask: Bool[np.ndarray, "3 L H"]) -> float:
        scores = score_sentences(run.model, mask_heads(run.params, mask), batches)
        progress.advance(1)
        return math.fsum(x.nll for x in scores) / sum(x.target_tokens for x in scores)

    with progress.task("masking heads", 1 + 2 * num_heads):
        whole = loss_of(np.ones(shape, bool))
        if not math.isfinite(whole):
            raise UsageError(
                f"the loss of {run.folder.path} at step {run.step} is {whole}, so its heads cannot "
                f"be compared; load another checkpoint"
            )
        masks = ~np.eye(num_heads, dtype=bool).reshape(num_heads, *shape)
        masked = np.array([loss_of(mask) for mask in masks]).reshape(shape)
        importance = HeadImportance(whole, masked, np.array([whole]), margin)
        losses = [whole]
        while losses[-1] <= whole + margin and len(losses) <= num_heads:
            losses.append(loss_of(importance.mask(len(losses))))
    return HeadImportance(whole, masked, np.array(losses), margin)
