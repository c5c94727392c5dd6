"""Attention weights with tokens and labels for both axes.

Shapes: Q queries, K keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from transformer_jax.errors import UsageError
from transformer_jax.visualization.attention_views import Resolved, Selection
from transformer_jax.visualization.text import printable


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one kind of attention, for all layers and heads."""

    label: str
    """The name of this kind of attention, such as "cross-attention"."""
    weights: Float[np.ndarray, "layer head Q K"]
    queries: tuple[str, ...]
    query_label: str
    """A description of the query tokens, for example "predicted token"."""
    keys: tuple[str, ...]
    key_label: str
    """A description of the key tokens, for example "source token"."""

    def __post_init__(self) -> None:
        expected = (len(self.queries), len(self.keys))
        if self.weights.shape[2:] != expected:
            raise ValueError(
                f"weights of {expected[0]} queries and {expected[1]} keys expected, "
                f"got {self.weights.shape}"
            )
        object.__setattr__(self, "queries", tuple(map(printable, self.queries)))
        object.__setattr__(self, "keys", tuple(map(printable, self.keys)))


AttentionMaps = Mapping[str, AttentionMap]


def select(maps: AttentionMaps, selection: Selection) -> tuple[AttentionMap, Resolved]:
    """Return the weights of the selected kind, and the selection with nonnegative indices."""
    if selection.kind not in maps:
        raise UsageError(f"kind must be one of {', '.join(maps)}, got {selection.kind!r}")
    chosen = maps[selection.kind]
    return chosen, selection.resolve(*chosen.weights.shape[:3])
