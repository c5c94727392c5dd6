"""Cached decoding, which computes `Transformer.decode` one position at a time.

The decoder generates one token at a time and reads the previous tokens (section 3.1). These
functions cache the keys and values of earlier positions and reuse the layers' modules for the rest.

A search keeps J hypotheses of each sentence in J beam slots. Keys and values stay in the slot that
computed them. When hypotheses move between slots, only `ancestors` changes: ancestors[b, j, l] is
the slot that read token l of the hypothesis now in slot j.

Shapes: B batch, S source positions, D d_model, H heads, K d_k, V d_v, N vocab_size, J hypotheses
per sentence, L maximum length of a translation; a cache has LJ = L J entries. `_` is an axis of any
size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.attention import MultiHeadAttention, Positions
from transformer_jax.model.layers import DecoderLayer
from transformer_jax.model.transformer import Params, Transformer, source_mask


class KeyValueCache(NamedTuple):
    """Keys and values, laid out so that a decoding step can read them as matrices."""

    keys: Float[Array, "B H K _"]
    values: Float[Array, "B H _ V"]


class DecodingState(NamedTuple):
    """The state that decoding carries from step to step."""

    caches: list[KeyValueCache]
    """For each layer, self-attention's keys [B, H, K, LJ] and values [B, H, LJ, V]."""
    memories: list[KeyValueCache]
    """For each layer, the projected encoder output: keys [B, H, K, S], values [B, H, S, V]."""
    memory_mask: Bool[Array, "B 1 1 S"]


class CacheView(NamedTuple):
    """The cache entries that the hypotheses at one position read and write."""

    start: Int[Array, ""]
    """The first of the J entries that this position writes."""
    mask: Bool[Array, "B 1 J LJ"]
    """True for the entries of the hypothesis's own tokens up to this position."""
    positions: Positions
    """The current position, repeated for J hypotheses, and the position of each entry."""

    @classmethod
    def at(cls, position: Int[Array, ""], ancestors: Int[Array, "B J L"]) -> "CacheView":
        """Return the view of the hypotheses with these ancestors at this position."""
        _, num_hypotheses, length = ancestors.shape
        slots = jnp.arange(num_hypotheses)
        is_past = jnp.arange(length)[:, None] <= position
        mask = (ancestors[..., None] == slots) & is_past
        return cls(
            start=position * num_hypotheses,
            mask=mask.reshape(*ancestors.shape[:2], -1)[:, None],
            positions=Positions(
                jnp.full(num_hypotheses, position), jnp.repeat(jnp.arange(length), num_hypotheses)
            ),
        )


def init_decoding(
    model: Transformer,
    params: Params,
    source: Int[Array, "B S"],
    *,
    num_hypotheses: int,
    max_length: int,
) -> DecodingState:
    """Encode the source, and allocate caches for `max_length` tokens of each hypothesis."""
    bound: Any = nn.apply(_init_decoding, model)
    return bound({"params": params}, source, num_hypotheses * max_length)


def decode_step(
    model: Transformer,
    params: Params,
    tokens: Int[Array, "B J"],
    position: Int[Array, ""],
    ancestors: Int[Array, "B J L"],
    state: DecodingState,
) -> tuple[Float[Array, "B J N"], DecodingState]:
    """Read one more token of each hypothesis, and return the logits of the next token.

    Args:
        model: the model.
        params: its parameters.
        tokens: the newest token of each hypothesis.
        position: the position of these tokens, counted from 0.
        ancestors: the beam slot that read each token of each hypothesis, including this position.
        state: the result of `init_decoding` or of the previous step.

    Returns:
        The logits that `Transformer.decode` would return at this position, and the state after this
        step.
    """
    bound: Any = nn.apply(_decode_step, model)
    return bound({"params": params}, tokens, position, ancestors, state)


def _init_decoding(
    model: Transformer, source: Int[Array, "B S"], num_entries: int
) -> DecodingState:
    c = model.config
    memory = model.encode(source)
    shape = len(source), c.num_heads
    return DecodingState(
        caches=[
            KeyValueCache(
                jnp.zeros((*shape, c.d_k, num_entries), c.dtype),
                jnp.zeros((*shape, num_entries, c.d_v), c.dtype),
            )
            for _ in model.decoder
        ],
        memories=[project_memory(layer, memory) for layer in model.decoder],
        memory_mask=source_mask(source),
    )


def _decode_step(
    model: Transformer,
    tokens: Int[Array, "B J"],
    position: Int[Array, ""],
    ancestors: Int[Array, "B J L"],
    state: DecodingState,
) -> tuple[Float[Array, "B J N"], DecodingState]:
    # Reshape to T = 1 so that the vector of this position broadcasts to all hypotheses.
    x = model.embedding.embed(tokens.reshape(-1, 1))
    x = model.target_positions(x, position[None]).reshape(*tokens.shape, -1)
    view = CacheView.at(position, ancestors)
    caches = []
    for layer, cache, memory in zip(model.decoder, state.caches, state.memories, strict=True):
        x, cache = decode_layer(layer, x, view, cache, memory, state.memory_mask)
        caches.append(cache)
    logits = model.output_embedding.logits(model.decoder_norm(x))
    return logits, state._replace(caches=caches)


def decode_layer(
    layer: DecoderLayer,
    x: Float[Array, "B J D"],
    view: CacheView,
    cache: KeyValueCache,
    memory: KeyValueCache,
    memory_mask: Bool[Array, "#B 1 1 S"],
) -> tuple[Float[Array, "B J D"], KeyValueCache]:
    """Compute `DecoderLayer.__call__` at one position of the J hypotheses of each sentence.

    Args:
        layer: a decoder layer, bound to its parameters.
        x: the vectors of this position.
        view: which position it is, and which entries each hypothesis reads.
        cache: self-attention's keys and values of earlier positions.
        memory: the result of `project_memory`.
        memory_mask: True for the source positions that are not padding.

    Returns:
        The layer's output, and the cache with this position written to it.
    """
    h = layer.self_attention_residual.enter(x)
    attended, cache = _attend_to_cache(layer.self_attention, h, view, cache)
    x = layer.self_attention_residual.leave(x, attended)
    h = layer.cross_attention_residual.enter(x)
    # The J hypotheses of a sentence are J queries to the same memory.
    attended = layer.cross_attention.attend(h, *from_cache_layout(memory), memory_mask)
    x = layer.cross_attention_residual.leave(x, attended)
    h = layer.feed_forward_residual.enter(x)
    return layer.feed_forward_residual.leave(x, layer.feed_forward(h)), cache


def _attend_to_cache(
    attention: MultiHeadAttention, x: Float[Array, "B J D"], view: CacheView, cache: KeyValueCache
) -> tuple[Float[Array, "B J D"], KeyValueCache]:
    """Write this position's keys and values to the cache, then attend as `view` allows.

    Each hypothesis reads the entries of all hypotheses, and the mask hides those that are not its
    ancestors. This costs less than moving the entries each time a hypothesis moves to another beam
    slot.
    """
    new = to_cache_layout(*attention.project_keys_and_values(x))
    update = jax.lax.dynamic_update_slice_in_dim
    cache = KeyValueCache(
        update(cache.keys, new.keys, view.start, 3), update(cache.values, new.values, view.start, 2)
    )
    attended = attention.attend(x, *from_cache_layout(cache), view.mask, view.positions)
    return attended, cache


def project_memory(layer: DecoderLayer, memory: Float[Array, "B S D"]) -> KeyValueCache:
    """Project the encoder's output once, for all steps of a translation."""
    return to_cache_layout(*layer.cross_attention.project_keys_and_values(memory))


def to_cache_layout(key: Float[Array, "B S H K"], value: Float[Array, "B S H V"]) -> KeyValueCache:
    """Transpose keys to [B, H, K, S] and values to [B, H, S, V]."""
    return KeyValueCache(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))


def from_cache_layout(
    cache: KeyValueCache,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Transpose keys and values back to [B, S, H, K] and [B, S, H, V]."""
    return cache.keys.transpose(0, 3, 1, 2), cache.values.swapaxes(1, 2)
