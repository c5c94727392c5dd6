"""Measure which attention heads matter: mask each head alone, and then mask many heads together.

Michel et al. (2019) found that many heads can be removed from a trained model. `mask_heads` masks
heads by zeroing parameters, so all masks share one compiled program.

Shapes: L layers, H heads per layer, P counts of masked heads (0, 1, 2, ...). The first axis of a
mask corresponds to the kinds of attention, in the order of `KINDS`.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float

from transformer_jax import progress
from transformer_jax.config.validation import checked
from transformer_jax.data.splits import Split
from transformer_jax.errors import Setting, UsageError
from transformer_jax.evaluation.evaluate import prepare_split
from transformer_jax.evaluation.perplexity import score_sentences, scoring_batches
from transformer_jax.inference.ensemble import require_single
from transformer_jax.inference.trained_run import Run
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.visualization.attention_figures import draw_heads
from transformer_jax.visualization.style import Picture

NUM_SENTENCES = 256
MARGIN = 0.05

# For each kind of attention, the stack that uses it and the name of its module in each layer.
MODULES = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}
KINDS = tuple(MODULES)


class Head(NamedTuple):
    """An attention head. Layers and heads are numbered from 0."""

    kind: str
    layer: int
    head: int


@dataclass(frozen=True, eq=False)
class HeadImportance:
    """A run's losses with masked heads, in nats per target token."""

    loss: float
    """The loss with all heads enabled."""
    masked_losses: Float[np.ndarray, "3 L H"]
    """The losses when a single head is masked. The axes are the kind of attention (in the order of
    `KINDS`), the layer, and the head."""
    pruned_losses: Float[np.ndarray, " P"]
    """The losses when the first 0, 1, 2, ... heads in `order` are masked. The array ends with the
    first loss above `loss` + `margin`, or with the loss when all heads are masked."""
    margin: float
    """The acceptable increase in loss."""

    @property
    def order(self) -> list[Head]:
        """All heads, sorted by the loss that results from masking each head alone, lowest first."""
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


@checked
def mask_heads(params: Params, mask: Bool[Array, "3 L H"] | Bool[np.ndarray, "3 L H"]) -> Params:
    """Return a copy of the parameters in which heads whose mask is False have no effect.

    Head i contributes head_i W_i^O to the output of its sub-layer (section 3.2.2), where W_i^O are
    the rows of W^O that belong to head i. Zeroing the rows of a head is exactly equivalent to
    zeroing the head's output. The other parameters are shared with `params`, not copied.

    Raises:
        UsageError: the model has no attention heads, the two stacks have different numbers of
            layers, or the mask's shape does not match the model's layers and heads.
    """
    if "self_attention" not in params.get("encoder_0", {}):
        raise UsageError(
            "this model has no attention heads: only those of a Transformer can be masked"
        )
    num_layers, num_decoder_layers = (
        sum(re.fullmatch(rf"{stack}_\d+", name) is not None for name in params)
        for stack in ("encoder", "decoder")
    )
    if num_layers != num_decoder_layers:
        raise UsageError(
            f"heads can be masked only if both stacks have the same number of layers, but this "
            f"model has {num_layers} and {num_decoder_layers}"
        )
    num_heads = params["encoder_0"]["self_attention"]["output"]["kernel"].shape[0]
    expected = (len(KINDS), num_layers, num_heads)
    if mask.shape != expected:
        raise UsageError(f"the head mask must have the shape {expected}, got {mask.shape}")
    masked: dict[tuple[str, ...], Any] = dict(flatten_dict(params))
    for (stack, module), of_layers in zip(MODULES.values(), mask, strict=True):
        for i, of_heads in enumerate(of_layers):
            kernel = f"{stack}_{i}", module, "output", "kernel"
            masked[kernel] = jnp.where(of_heads[:, None, None], masked[kernel], 0.0)
    return unflatten_dict(masked)


@checked
def head_importance(
    run: Run, *, split: Split = "dev", num_sentences: int = NUM_SENTENCES, margin: float = MARGIN
) -> HeadImportance:
    """Compute the loss with masked heads on the first `num_sentences` sentences in a split.

    This function first masks one head at a time. The function then masks the heads cumulatively,
    least important first, until the loss exceeds the full model's loss by more than `margin` nats
    per token.

    Raises:
        UsageError: the run is an ensemble, `num_sentences` is not positive, the margin is negative
            or NaN, the split does not exist, the loss is not finite, or `mask_heads` rejects the
            model.
        DataError: the run's text has changed.
    """
    require_single(run)
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
