"""Blockwise attention: equation 1 without storing all of its weights at once.

Full attention writes [B, H, T, S] scores to memory, then reads and writes them several times, which
takes more time than the matrix products if sequences are long. Here each block of queries visits
the keys block by block, and a running maximum and sum accumulate the softmax ("online softmax":
Milakov and Gimelshein 2018; Rabe and Staats 2021; FlashAttention, Dao et al. 2022). The backward
pass recomputes the weights, so memory grows linearly with the length, not quadratically.

On two CPU cores, with 2,048 tokens per batch, a training step takes 0.50 times as long as with full
attention at length 2,048, and 0.89 times as long at length 1,024.

Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v; n blocks of t queries, m blocks of s
keys. The last block is padded. Masks are boolean, and True where attention is allowed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from transformer_jax.model.dropout import keep_mask

Index = int | Int[Array, ""]

# The maximum numbers of queries and keys in a block. One head's scores fit in the processor's
# cache, and the matrix products are still large enough to be efficient. On a CPU, other sizes from
# 256 to 1024 take 1.02 to 1.07 times as long.
MAX_QUERIES, MAX_KEYS = 256, 512

# The score of a masked key. It is finite, so a query that may not attend to any key attends evenly.
MASKED = jnp.finfo(jnp.float32).min


def blockwise_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    mask: Bool[Array, "#B #H #T S"],
    *,
    scale: float,
    rate: float = 0.0,
    rng: Array | None = None,
) -> Float[Array, "B T H V"]:
    """Average the values by softmax(scale q k), as `MultiHeadAttention` does, but block by block.

    Args:
        query: queries of each head.
        key: keys of each head.
        value: values of each head.
        mask: True where attention is allowed. A query that may not attend to any key attends
            evenly.
        scale: the factor that multiplies the dot products.
        rate: the dropout rate of the weights. The same weights are dropped as in full attention.
        rng: dropout's key; None for no dropout.
    """
    return _attention(scale, 0.0 if rng is None else rate, query, key, value, mask, rng)


def block_size(length: int, max_size: int) -> int:
    """Return the smallest block size that needs no more blocks than `max_size` does."""
    return -(-length // -(-length // max_size))


def split_blocks(x: Float[Array, "B T H K"], size: int) -> Float[Array, "H n B t K"]:
    """Split a sequence into blocks and separate its heads; pad the last block with zeros."""
    batch, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
    return x.reshape(batch, -1, size, heads, width).transpose(3, 1, 0, 2, 4)


def join_blocks(x: Float[Array, "H n B t K"], length: int) -> Float[Array, "B T H K"]:
    """Undo `split_blocks`."""
    heads, _, batch, _, width = x.shape
    return x.transpose(2, 1, 3, 0, 4).reshape(batch, -1, heads, width)[:, :length]


def block_mask(
    mask: Bool[Array, "#B #H #T S"], num_queries: int, query_size: int, key_size: int
) -> tuple[Bool[Array, "#H #n m #B #t s"], Int[Array, " n"]]:
    """Split a mask into blocks of `query_size` queries and `key_size` keys.

    Returns:
        The blocks of the mask, and the number of key blocks that each query block must visit,
        because no query in it may attend to later keys. With a causal mask, slightly more than half
        of all pairs of blocks remain.
    """
    batch, heads, rows, keys = mask.shape
    last = jnp.max(jnp.where(mask, jnp.arange(1, keys + 1), 0), axis=-1)
    # A query that may not attend to any key visits all keys.
    last = jnp.max(jnp.where(last == 0, keys, last), axis=(0, 1))
    last = jnp.pad(jnp.broadcast_to(last, num_queries), (0, -num_queries % query_size))
    num_key_blocks = -(-jnp.max(last.reshape(-1, query_size), axis=1) // key_size)

    size = query_size if rows > 1 else 1
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -rows % size), (0, -keys % key_size)))
    mask = mask.reshape(batch, heads, -1, size, mask.shape[-1] // key_size, key_size)
    return mask.transpose(1, 2, 4, 0, 3, 5), num_key_blocks


def dynamic_index(x: Shaped[Array, "..."], *indices: Index) -> Shaped[Array, "..."]:
    """Return x[indices], broadcasting axes of size one."""
    for index in indices:
        x = jax.lax.dynamic_index_in_dim(x, index if len(x) > 1 else 0, keepdims=False)
    return x


def add_at(x: Float[Array, "m ..."], j: Index, y: Float[Array, "..."]) -> Float[Array, "m ..."]:
    """Return x with y added to x[j]."""
    return jax.lax.dynamic_update_index_in_dim(x, dynamic_index(x, j) + y, j, 0)


def float32_einsum(equation: str, *arrays: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `jnp.einsum` with float32 sums regardless of the compute dtype."""
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)


class Blocks:
    """The inputs of both passes: blocks of queries, keys, values, and mask, and dropout's mask."""

    def __init__(
        self,
        query: Float[Array, "B T H K"],
        key: Float[Array, "B S H K"],
        value: Float[Array, "B S H V"],
        mask: Bool[Array, "#B #H #T S"],
        rng: Array | None,
        *,
        scale: float,
        rate: float,
    ) -> None:
        """Split all arrays into blocks; keys and values become columns, [K, s]."""
        self.batch, self.num_queries, self.heads, _ = query.shape
        self.num_keys = key.shape[1]
        self.query_size = block_size(self.num_queries, MAX_QUERIES)
        self.key_size = block_size(self.num_keys, MAX_KEYS)
        self.query = split_blocks(query, self.query_size)
        self.key = split_blocks(key, self.key_size).swapaxes(-1, -2)
        self.value = split_blocks(value, self.key_size).swapaxes(-1, -2)
        self.mask, self.num_key_blocks = block_mask(
            mask, self.num_queries, self.query_size, self.key_size
        )
        # Padding keys in the last block get no weight, even if a query may not attend to any key.
        exists = jnp.arange(self.key.shape[1] * self.key_size) < self.num_keys
        self.masked_score = jnp.where(exists, MASKED, -jnp.inf).reshape(-1, self.key_size)
        self.rng, self.scale, self.rate = rng, scale, rate

    def scores(
        self, query: Float[Array, "B t K"], head: Index, i: Index, j: Index
    ) -> tuple[Float[Array, "B t s"], Bool[Array, "#B #t s"]]:
        """Return the scores of query block i with key block j, and the block of the mask."""
        key = dynamic_index(self.key, head, j)
        scores = float32_einsum("btk,bks->bts", query, key) * self.scale
        mask = dynamic_index(self.mask, head, i, j)
        return jnp.where(mask, scores, self.masked_score[j]), mask

    def drop(
        self, x: Float[Array, "B t s"], head: Index, i: Index, j: Index
    ) -> Float[Array, "B t s"]:
        """Set to zero the weights that full attention would drop, without scaling the rest.

        The dropout mask is a function of an element's row-major index in the whole [B, H, T, S]
        array.
        """
        if self.rng is None:
            return x

        def indices(start: Index, count: int) -> UInt32[Array, " count"]:
            return jnp.asarray(start, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)

        index = indices(0, self.batch)[:, None, None] * self.heads + jnp.uint32(head)
        index = index * self.num_queries + indices(i * self.query_size, self.query_size)[:, None]
        index = index * self.num_keys + indices(j * self.key_size, self.key_size)
        return jnp.where(keep_mask(self.rng, self.rate, index), x, 0)


class Residuals(NamedTuple):
    """What the backward pass needs from the forward pass. Only the mask has size T S."""

    query: Float[Array, "B T H K"]
    key: Float[Array, "B S H K"]
    value: Float[Array, "B S H V"]
    mask: Bool[Array, "#B #H #T S"]
    rng: Array | None
    output: Float[Array, "B T H V"]
    row_max: Float[Array, "H n B t 1"]
    log_sum: Float[Array, "H n B t 1"]


Triple = tuple[Array, Array, Array]


def forward(
    scale: float,
    rate: float,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    mask: Bool[Array, "#B #H #T S"],
    rng: Array | None,
) -> tuple[Float[Array, "B T H V"], Residuals]:
    """Compute attention and visit the keys once for each block of queries."""
    blocks = Blocks(query, key, value, mask, rng, scale=scale, rate=rate)

    def visit_queries(head: Index, i: Index) -> Triple:
        queries = dynamic_index(blocks.query, head, i)

        def add_keys(j: Index, carry: Triple) -> Triple:
            row_max, total, output = carry
            scores, _ = blocks.scores(queries, head, i, j)
            new_max = jnp.maximum(row_max, scores.max(-1, keepdims=True))
            weights = jnp.exp(scores - new_max)
            # Rescale the sums so far to the new maximum.
            correction = jnp.exp(row_max - new_max)
            total = correction * total + weights.sum(-1, keepdims=True)
            weights = blocks.drop(weights, head, i, j).astype(value.dtype)
            values = dynamic_index(blocks.value, head, j)
            added = float32_einsum("bts,bvs->btv", weights, values)
            return new_max, total, correction * output + added

        row = (*queries.shape[:-1], 1)
        zeros = jnp.zeros((*queries.shape[:-1], value.shape[-1]))
        start = (jnp.full(row, MASKED), jnp.zeros(row), zeros)
        row_max, total, output = jax.lax.fori_loop(0, blocks.num_key_blocks[i], add_keys, start)
        return (output / (total * (1 - rate))).astype(value.dtype), row_max, jnp.log(total)

    def visit_head(head: Index) -> Triple:
        visit = functools.partial(visit_queries, head)
        return jax.lax.map(visit, jnp.arange(len(blocks.num_key_blocks)))

    output, row_max, log_sum = jax.lax.map(visit_head, jnp.arange(blocks.heads))
    output = join_blocks(output, query.shape[1])
    return output, Residuals(query, key, value, mask, rng, output, row_max, log_sum)


def backward(
    scale: float, rate: float, residuals: Residuals, gradient: Float[Array, "B T H V"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"], None, None]:
    """Visit the keys once more, and sum the contributions of all pairs of blocks to the gradients.

    For weights w with gradients dw, the gradient of a score is w (dw - sum of w dw over the keys).
    That sum equals the dot product of the output and its gradient, also with dropout.
    """
    query, key, value, mask, rng, output, row_max, log_sum = residuals
    blocks = Blocks(query, key, value, mask, rng, scale=scale, rate=rate)
    dtype = gradient.dtype
    sums = jnp.sum(gradient.astype(jnp.float32) * output, axis=-1, keepdims=True)
    sums = split_blocks(sums, blocks.query_size)
    gradient = split_blocks(gradient / (1 - rate), blocks.query_size)

    def visit_queries(
        head: Index, carry: tuple[Array, Array], i: Index
    ) -> tuple[tuple[Array, Array], Array]:
        queries, d_output = dynamic_index(blocks.query, head, i), dynamic_index(gradient, head, i)
        block_max, block_log_sum, block_sums = (
            dynamic_index(x, head, i) for x in (row_max, log_sum, sums)
        )

        def add_keys(j: Index, carry: Triple) -> Triple:
            d_query, d_key, d_value = carry
            keys = dynamic_index(blocks.key, head, j)
            values = dynamic_index(blocks.value, head, j)
            scores, mask = blocks.scores(queries, head, i, j)
            # Subtract the maximum and the logarithm separately: in a fully masked row, the
            # logarithm would vanish in their float32 sum.
            weights = jnp.exp(scores - block_max - block_log_sum)
            d_weights = blocks.drop(float32_einsum("btv,bvs->bts", d_output, values), head, i, j)
            d_scores = jnp.where(mask, weights * (d_weights - block_sums) * scale, 0).astype(dtype)
            dropped = blocks.drop(weights, head, i, j).astype(dtype)
            d_query += float32_einsum("bts,bks->btk", d_scores, keys)
            d_key = add_at(d_key, j, float32_einsum("bts,btk->bks", d_scores, queries))
            d_value = add_at(d_value, j, float32_einsum("bts,btv->bvs", dropped, d_output))
            return d_query, d_key, d_value

        start = jnp.zeros(queries.shape), *carry
        d_query, d_key, d_value = jax.lax.fori_loop(0, blocks.num_key_blocks[i], add_keys, start)
        return (d_key, d_value), d_query

    def visit_head(head: Index) -> Triple:
        start = jnp.zeros(blocks.key.shape[1:]), jnp.zeros(blocks.value.shape[1:])
        visit = functools.partial(visit_queries, head)
        indices = jnp.arange(len(blocks.num_key_blocks))
        (d_key, d_value), d_query = jax.lax.scan(visit, start, indices)
        return d_query, d_key, d_value

    d_query, d_key, d_value = jax.lax.map(visit_head, jnp.arange(blocks.heads))
    return (
        join_blocks(d_query, blocks.num_queries).astype(dtype),
        join_blocks(d_key.swapaxes(-1, -2), blocks.num_keys).astype(dtype),
        join_blocks(d_value.swapaxes(-1, -2), blocks.num_keys).astype(dtype),
        None,
        None,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scale: float,
    rate: float,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    mask: Bool[Array, "#B #H #T S"],
    rng: Array | None,
) -> Float[Array, "B T H V"]:
    return forward(scale, rate, query, key, value, mask, rng)[0]


_attention.defvjp(forward, backward)
