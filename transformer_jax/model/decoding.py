"""Cached decoding, which evaluates `Transformer.decode` one position at a time.

A search keeps J hypotheses per sentence in J beam slots. When the hypothesis in slot j reads token
l, the model writes the token's key and value to cache entry l J + j. Cache entries never move. When
hypotheses move between slots, only `ancestors` changes: for the hypothesis that is now in slot j,
ancestors[b, j, l] is the slot that read token l, so the token's key and value are in cache entry
l J + ancestors[b, j, l].

Shapes: B batch, S source positions, D d_model, G heads of keys and values, K d_k, V d_v, N
vocab_size, J hypotheses per sentence, L maximum translation length, LJ = L J cache entries, _ any
size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.attention import MultiHeadAttention, Positions
from transformer_jax.model.layers import DecoderLayer


class KeyValueCache(NamedTuple):
    """Keys and values in the layout that a decoding step reads fastest: one matrix per head."""

    keys: Float[Array, "B G K _"]
    values: Float[Array, "B G _ V"]


class DecodingState(NamedTuple):
    """The arrays that are carried from one decoding step to the next."""

    caches: list[KeyValueCache]
    """Each layer's self-attention keys [B, G, K, LJ] and values [B, G, LJ, V]."""
    memories: list[KeyValueCache]
    """Each layer's cross-attention keys [B, G, K, S] and values [B, G, S, V]."""
    memory_mask: Bool[Array, "B 1 1 S"]


class CacheView(NamedTuple):
    """The cache entries that a decoding step reads and writes for all hypotheses."""

    start: Int[Array, ""]
    """The index of the first of the J cache entries that this step writes."""
    mask: Bool[Array, "B 1 J LJ"]
    """True for the cache entries of the hypothesis's own tokens, up to the current position."""
    positions: Positions
    """The current position, repeated J times, and the position of each cache entry."""

    @classmethod
    def at(cls, position: Int[Array, ""], ancestors: Int[Array, "B J L"]) -> "CacheView":
        """Return the view of the cache at a position, given the `ancestors` of each hypothesis."""
        num_sentences, num_hypotheses, length = ancestors.shape
        is_written = jnp.arange(length)[None, None, :, None] <= position
        # The mask has the shape [B, J, L, J]. For each token of each hypothesis in each sentence,
        # the mask is True at the beam slot that read the token.
        mask = jax.nn.one_hot(ancestors, num_hypotheses, dtype=bool) & is_written
        mask = mask.reshape(num_sentences, 1, num_hypotheses, -1)
        queries = jnp.full(num_hypotheses, position)
        keys = jnp.repeat(jnp.arange(length), num_hypotheses)
        return cls(position * num_hypotheses, mask, Positions(queries, keys))


def empty_cache(
    attention: MultiHeadAttention, x: Float[Array, "B D"], num_entries: int
) -> KeyValueCache:
    """Return a cache of zeros for the keys and values of self-attention with inputs like x."""
    x = jnp.zeros((len(x), num_entries, x.shape[-1]), x.dtype)
    # XLA does not compute the projections, because only their shapes are used.
    return jax.tree.map(jnp.zeros_like, to_cache_layout(attention, x))


def decode_layer(
    layer: DecoderLayer,
    x: Float[Array, "B J D"],
    view: CacheView,
    cache: KeyValueCache,
    memory: KeyValueCache,
    memory_mask: Bool[Array, "#B 1 1 S"],
) -> tuple[Float[Array, "B J D"], KeyValueCache]:
    """Evaluate the layer at a single position, and cache the new keys and values.

    The layer must be bound to its parameters. `memory` contains projected keys and values.
    """

    def attend(h: Float[Array, "B J D"]) -> Float[Array, "B J D"]:
        nonlocal cache
        new = to_cache_layout(layer.self_attention, h)
        update = jax.lax.dynamic_update_slice_in_dim
        keys = update(cache.keys, new.keys, view.start, axis=3)
        cache = KeyValueCache(keys, update(cache.values, new.values, view.start, axis=2))
        # The J hypotheses of a sentence act as J queries. Masking the entries of other hypotheses
        # is cheaper than moving entries between slots.
        return layer.self_attention.attend(h, *from_cache_layout(cache), view.mask, view.positions)

    def read_memory(h: Float[Array, "B J D"]) -> Float[Array, "B J D"]:
        return layer.cross_attention.attend(h, *from_cache_layout(memory), memory_mask)

    x = layer.connect(x, attend, read_memory)
    return x, cache


def to_cache_layout(attention: MultiHeadAttention, x: Float[Array, "B _ D"]) -> KeyValueCache:
    """Project each row of x to keys [B, G, K, _] and values [B, G, _, V]."""
    key, value = attention.project_keys_and_values(x)
    return KeyValueCache(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))


def from_cache_layout(
    cache: KeyValueCache,
) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G V"]]:
    """Transpose keys and values back to [B, S, G, K] and [B, S, G, V]."""
    return cache.keys.transpose(0, 3, 1, 2), cache.values.swapaxes(1, 2)
