"""What an attention figure shows: the kind of attention, the layer, the heads, and the view."""

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

from transformer_jax.config.validation import did_you_mean
from transformer_jax.errors import UsageError

Kind = Literal["encoder", "decoder", "cross"]
"""Encoder self-attention, decoder self-attention, or the decoder's attention to the encoder."""

View = Literal["heads", "grid", "alignment"]
"""heads: two columns of tokens (figures 3 to 5). grid: all heat maps. alignment: the mean."""


@dataclass(frozen=True)
class Selection:
    """The part of the attention weights that a figure shows. `Attention` describes the indices."""

    kind: str = "cross"
    """The kind of attention: one of the values of `Kind`."""
    layer: SupportsIndex = -1
    view: str = "heads"
    """The view to draw: a value of `View`. The grid always shows all layers, heads, and tokens."""
    heads: Collection[SupportsIndex] | None = None
    """The indices of the heads to show (such as a list or a NumPy array), or None for all heads."""
    position: SupportsIndex | None = None
    """If given, show only the attention of the query token at this position. The alignment view
    shows all tokens and highlights this one."""

    def __post_init__(self) -> None:
        for name, value, allowed in (("kind", self.kind, Kind), ("view", self.view, View)):
            if value not in (choices := get_args(allowed)):
                hint = did_you_mean(value, choices)
                raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")

    def resolve(self, num_layers: int, num_heads: int, num_queries: int) -> "Resolved":
        """Return the selection with negative indices converted to nonnegative ones."""
        if self.heads is not None and len(self.heads) == 0:
            raise UsageError("no head is selected: name at least one")
        heads = range(num_heads) if self.heads is None else self.heads
        position = self.position
        return Resolved(
            _resolve_index("layer", self.layer, num_layers),
            tuple(sorted({_resolve_index("head", head, num_heads) for head in heads})),
            None if position is None else _resolve_index("position", position, num_queries),
        )


@dataclass(frozen=True)
class Resolved:
    """The indices of a selection, converted to nonnegative numbers."""

    layer: int
    heads: tuple[int, ...]
    position: int | None


def _resolve_index(name: str, index: SupportsIndex, size: int) -> int:
    number = operator.index(index)
    if not -size <= number < size:
        raise UsageError(
            f"{name} {number} does not exist: choose one from 0 to {size - 1}, "
            f"or from -{size} to -1 to count from the end"
        )
    return number % size
