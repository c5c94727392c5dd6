"""Restricted self-attention (section 4): each position attends only to its neighborhood.

With this restriction, a layer takes O(r T D) operations instead of O(T^2 D), and a path between the
two ends of a sequence takes O(T / r) layers instead of one (Table 1, which uses n for T). The paper
centers a neighborhood of size r on each position, so a maximum distance of w gives r = 2 w + 1.

Queries are split into blocks of w positions. If the sequence is short, blocks can be smaller. A
block of queries attends to three blocks of keys: the block at the same positions and the blocks
before and after it.

Shapes: B batch, T positions, S keys, D d_model, H heads, K d_k, V d_v; n blocks, each with t
queries and s = 3 t keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from transformer_jax.model.attention import Heads, MultiHeadAttention, masked_softmax, weighted_sum
from transformer_jax.model.variants.relative_positions import relative_positions


def split_blocks(x: Shaped[Array, "B T ..."], size: int) -> Shaped[Array, "B n t ..."]:
    """Split positions into blocks; pad the last block with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def join_neighbors(x: Shaped[Array, "B n t ..."]) -> Shaped[Array, "B n s ..."]:
    """Join each block with the blocks before and after it; use zeros outside the sequence."""
    padded = jnp.pad(x, ((0, 0), (1, 1), *[(0, 0)] * (x.ndim - 2)))
    return jnp.concatenate([padded[:, :-2], x, padded[:, 2:]], axis=2)


def block_size(length: int, window: int) -> int:
    """Return the number of positions in a block.

    If a sequence has at most two blocks, each block attends to all keys. The blocks can therefore
    be smaller than the window, which avoids padding the sequence to a multiple of the window.
    """
    blocks = -(-length // window)
    return window if blocks > 2 else -(-length // blocks)


def neighborhood_mask(
    mask: Bool[Array, "#B #H #T T"], window: int, size: int
) -> tuple[Bool[Array, "#B n #H t s"], Int[Array, "n t s"]]:
    """Return the mask over each query block's joined keys, and the positions of these keys."""
    length = mask.shape[-1]
    queries = split_blocks(jnp.arange(length)[None], size)[0]
    # Padding queries get position 0, but their results are discarded.
    starts = size * jnp.arange(-1, len(queries) - 1)
    keys = starts[:, None] + jnp.arange(3 * size)[None]
    keys = jnp.broadcast_to(keys[:, None], (*queries.shape, 3 * size))
    exists = (keys >= 0) & (keys < length)
    is_near = jnp.abs(keys - queries[..., None]) <= window
    rows = jnp.minimum(queries, mask.shape[2] - 1)[..., None]
    blocks = mask[:, :, rows, jnp.clip(keys, 0, length - 1)] & (exists & is_near)[None, None]
    return blocks.swapaxes(1, 2), keys


class WindowedAttention(MultiHeadAttention):
    """Attention to keys that are at most `attention_window` positions before or after the query.

    Differs from the paper, which suggests this restriction for long sequences as future work.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"],
        mask: Bool[Array, "#B #H #T T"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attend within x, block by block. `memory` is x itself."""
        batch, length, _ = x.shape
        size = block_size(length, self.window)
        key, value = (
            join_neighbors(split_blocks(y, size)) for y in self.project_keys_and_values(memory)
        )
        query = split_blocks(self.project_queries(x), size)
        allowed, keys = neighborhood_mask(mask, self.window, size)
        allowed = jnp.broadcast_to(allowed, (batch, *allowed.shape[1:]))
        # The score function treats each block as a separate sequence.
        query, key, value, allowed = (
            y.reshape(-1, *y.shape[2:]) for y in (query, key, value, allowed)
        )
        weights = masked_softmax(self.score(query, key), allowed)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "weights", spread_weights(weights, keys, batch, length))
        y = weighted_sum(self.dropout(weights, train=train), value)
        return self.output(y.reshape(batch, -1, *y.shape[2:])[:, :length])

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        """Attend from queries at the given positions, as in cached decoding; mask distant keys."""
        is_near = jnp.abs(relative_positions(heads.positions)) <= self.window
        return super().attend_heads(heads._replace(mask=heads.mask & is_near[None, None]), train)

    @property
    def window(self) -> int:
        """The distance from a query to the farthest key that it attends to."""
        if self.config.attention_window is None:
            raise ValueError("model.attention_window is not set")
        return self.config.attention_window


def spread_weights(
    weights: Float[Array, "Bn H t s"], keys: Int[Array, "n t s"], batch: int, length: int
) -> Float[Array, "B H T T"]:
    """Return weights over all keys, with zeros outside each query's key blocks."""
    _, heads, size, _ = weights.shape
    blocks = len(keys)
    weights = weights.reshape(batch, blocks, heads, size, -1)
    # The columns for keys outside the sequence are discarded; their weights are zero, except in
    # rows whose keys are all masked.
    full = jnp.zeros((batch, heads, blocks * size, (blocks + 2) * size), weights.dtype)
    rows = jnp.arange(blocks * size).reshape(blocks, size)[..., None]
    full = full.at[:, :, rows, keys + size].set(weights.swapaxes(1, 2))
    return full[:, :, :length, size : size + length]
