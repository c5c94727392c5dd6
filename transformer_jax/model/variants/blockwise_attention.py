"""Attention a block at a time: equation 1 without ever holding all of its weights.

The plain path writes [B, H, T, S] scores to memory, and reads and writes them several times; of
long sequences that takes more time than the products. Here a block of queries meets the keys
block by block, while a running maximum and sum make up the softmax ("online softmax": Milakov and
Gimelshein 2018, Rabe and Staats 2021, FlashAttention of Dao et al. 2022). The backward pass
computes the weights again, so memory grows with the length, not with its square.

Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v; n blocks of t queries, m blocks of s
keys, of which the last is filled up. Masks are boolean, and True where attention is allowed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from transformer_jax.model.dropout import keep_mask

Place = int | Int[Array, ""]

# At most so many queries and keys make a block, so that one head's scores stay in the cache and
# products are long enough. On a CPU other sizes from 256 to 1024 took 1.02 to 1.07 of the time.
QUERIES, KEYS = 256, 512

LEAST = jnp.finfo(jnp.float32).min


def block_size(length: int, most: int) -> int:
    """Return the size of equal blocks that fit the length best."""
    return -(-length // -(-length // most))


def cut(x: Float[Array, "B T H K"], size: int) -> Float[Array, "H n B t K"]:
    """Cut a sequence into blocks, and part its heads; the last block is filled up with zeros."""
    batch, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
    return x.reshape(batch, -1, size, heads, width).transpose(3, 1, 0, 2, 4)


def joined(x: Float[Array, "H n B t K"], length: int) -> Float[Array, "B T H K"]:
    """Undo `cut`."""
    heads, _, batch, _, width = x.shape
    return x.transpose(2, 1, 3, 0, 4).reshape(batch, -1, heads, width)[:, :length]


def fitted(
    mask: Bool[Array, "#B #H #T S"], queries: int, size: int, width: int
) -> tuple[Bool[Array, "#H #n m #B #t s"], Int[Array, " n"]]:
    """Cut a mask into blocks of `size` queries and `width` keys.

    Returns:
        The blocks, and how many blocks of keys each block of queries has to look at: none of its
        queries may attend to what is after these. A causal mask leaves little more than half.
    """
    batch, heads, rows, keys = mask.shape
    last = jnp.max(jnp.where(mask, jnp.arange(1, keys + 1), 0), axis=-1)
    # A query that may attend nowhere looks at all keys.
    last = jnp.max(jnp.where(last == 0, keys, last), axis=(0, 1))
    last = jnp.pad(jnp.broadcast_to(last, queries), (0, -queries % size))
    reach = -(-jnp.max(last.reshape(-1, size), axis=1) // width)

    size = size if rows > 1 else 1
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -rows % size), (0, -keys % width)))
    mask = mask.reshape(batch, heads, -1, size, mask.shape[-1] // width, width)
    return mask.transpose(1, 2, 4, 0, 3, 5), reach


class Blocks:
    """What both passes look at: blocks of queries, keys, values and mask, and dropout's choice."""

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
        """Cut all into blocks; keys and values with their vectors as columns, [H m B K s]."""
        self.batch, self.queries, self.heads, _ = query.shape
        self.keys = key.shape[1]
        self.size, self.width = block_size(self.queries, QUERIES), block_size(self.keys, KEYS)
        self.query = cut(query, self.size)
        self.key = cut(key, self.width).swapaxes(-1, -2)
        self.value = cut(value, self.width).swapaxes(-1, -2)
        self.mask, self.reach = fitted(mask, self.queries, self.size, self.width)
        # What fills the last block up has no weight even where nothing is allowed.
        exists = jnp.arange(self.key.shape[1] * self.width) < self.keys
        self.masked = jnp.where(exists, LEAST, -jnp.inf).reshape(-1, self.width)
        self.rng, self.scale, self.rate = rng, scale, rate

    def scores(
        self, query: Float[Array, "B t K"], head: Place, i: Place, j: Place
    ) -> tuple[Float[Array, "B t s"], Bool[Array, "#B #t s"]]:
        """Return scores of block i of queries with block j of keys, and which are allowed."""
        scores = product("btk,bks->bts", query, pick(self.key, head, j)) * self.scale
        mask = pick(self.mask, head, i, j)
        return jnp.where(mask, scores, self.masked[j]), mask

    def drop(
        self, x: Float[Array, "B t s"], head: Place, i: Place, j: Place
    ) -> Float[Array, "B t s"]:
        """Set to zero what dropout of the whole [B, H, T, S] does; the rest is not scaled yet."""
        if self.rng is None:
            return x

        def places(start: Place, count: int) -> UInt32[Array, " count"]:
            return jnp.asarray(start, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)

        index = places(0, self.batch)[:, None, None] * self.heads + jnp.uint32(head)
        index = index * self.queries + places(i * self.size, self.size)[:, None]
        index = index * self.keys + places(j * self.width, self.width)
        return jnp.where(keep_mask(self.rng, self.rate, index), x, 0)


def pick(x: Shaped[Array, "..."], *places: Place) -> Shaped[Array, "..."]:
    """Return x[places], where an axis of one stands for any number."""
    for place in places:
        x = jax.lax.dynamic_index_in_dim(x, place if len(x) > 1 else 0, keepdims=False)
    return x


def product(equation: str, *arrays: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply, with sums in float32 whatever the compute dtype."""
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass: nothing of size T S but the mask."""

    query: Float[Array, "B T H K"]
    key: Float[Array, "B S H K"]
    value: Float[Array, "B S H V"]
    mask: Bool[Array, "#B #H #T S"]
    rng: Array | None
    mixed: Float[Array, "B T H V"]
    largest: Float[Array, "H n B t 1"]
    log_total: Float[Array, "H n B t 1"]


def forward(
    scale: float,
    rate: float,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    mask: Bool[Array, "#B #H #T S"],
    rng: Array | None,
) -> tuple[Float[Array, "B T H V"], Residuals]:
    """Go over the keys once, for a block of queries at a time."""
    blocks = Blocks(query, key, value, mask, rng, scale=scale, rate=rate)

    def of_queries(head: Place, i: Place) -> tuple[Array, Array, Array]:
        queries = pick(blocks.query, head, i)

        def add(j: Place, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, mixed = carry
            scores, _ = blocks.scores(queries, head, i, j)
            larger = jnp.maximum(largest, scores.max(-1, keepdims=True))
            weights = jnp.exp(scores - larger)
            # What was added up so far is brought to the new maximum.
            before = jnp.exp(largest - larger)
            total = before * total + weights.sum(-1, keepdims=True)
            weights = blocks.drop(weights, head, i, j).astype(value.dtype)
            new = product("bts,bvs->btv", weights, pick(blocks.value, head, j))
            return larger, total, before * mixed + new

        row = (*queries.shape[:-1], 1)
        nothing = jnp.zeros((*queries.shape[:-1], value.shape[-1]))
        start = (jnp.full(row, LEAST), jnp.zeros(row), nothing)
        largest, total, mixed = jax.lax.fori_loop(0, blocks.reach[i], add, start)
        return (mixed / (total * (1 - rate))).astype(value.dtype), largest, jnp.log(total)

    def of_head(head: Place) -> tuple[Array, Array, Array]:
        return jax.lax.map(functools.partial(of_queries, head), jnp.arange(len(blocks.reach)))

    mixed, largest, log_total = jax.lax.map(of_head, jnp.arange(blocks.heads))
    mixed = joined(mixed, query.shape[1])
    return mixed, Residuals(query, key, value, mask, rng, mixed, largest, log_total)


def backward(
    scale: float, rate: float, residuals: Residuals, gradient: Float[Array, "B T H V"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"], None, None]:
    """Go over the keys once more, and add up what each pair of blocks gives to the gradients.

    With weights w, of which dropout makes w', the gradient of a score is w (dw - sum of w dw)
    over the keys; that sum is the product of the output with its gradient.
    """
    query, key, value, mask, rng, mixed, largest, log_total = residuals
    blocks = Blocks(query, key, value, mask, rng, scale=scale, rate=rate)
    dtype = gradient.dtype
    sums = jnp.sum(gradient.astype(jnp.float32) * mixed, axis=-1, keepdims=True)
    sums, gradient = cut(sums, blocks.size), cut(gradient / (1 - rate), blocks.size)

    def of_queries(head: Place, carry: tuple[Array, Array], i: Place) -> tuple[Any, Array]:
        queries, d_mixed = pick(blocks.query, head, i), pick(gradient, head, i)
        row = pick(largest, head, i), pick(log_total, head, i), pick(sums, head, i)

        def add(j: Place, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_value = carry
            keys, values = pick(blocks.key, head, j), pick(blocks.value, head, j)
            scores, mask = blocks.scores(queries, head, i, j)
            # Not less their sum: of a row with nothing allowed, log_total would be lost in it.
            weights = jnp.exp(scores - row[0] - row[1])
            d_weights = blocks.drop(product("btv,bvs->bts", d_mixed, values), head, i, j)
            d_scores = jnp.where(mask, weights * (d_weights - row[2]) * scale, 0).astype(dtype)
            dropped = blocks.drop(weights, head, i, j).astype(dtype)
            d_query += product("bts,bks->btk", d_scores, keys)
            d_key = add_at(d_key, j, product("bts,btk->bks", d_scores, queries))
            d_value = add_at(d_value, j, product("bts,btv->bvs", dropped, d_mixed))
            return d_query, d_key, d_value

        nothing = jnp.zeros(queries.shape)
        d_query, *rest = jax.lax.fori_loop(0, blocks.reach[i], add, (nothing, *carry))
        return tuple(rest), d_query

    def of_head(head: Place) -> tuple[Array, Array, Array]:
        nothing = jnp.zeros(blocks.key.shape[1:]), jnp.zeros(blocks.value.shape[1:])
        each = jnp.arange(len(blocks.reach))
        of_keys, of_query = jax.lax.scan(functools.partial(of_queries, head), nothing, each)
        return of_query, *of_keys

    d_query, d_key, d_value = jax.lax.map(of_head, jnp.arange(blocks.heads))
    return (
        joined(d_query, blocks.queries).astype(dtype),
        joined(d_key.swapaxes(-1, -2), blocks.keys).astype(dtype),
        joined(d_value.swapaxes(-1, -2), blocks.keys).astype(dtype),
        None,
        None,
    )


def add_at(x: Float[Array, "m ..."], j: Place, new: Float[Array, "..."]) -> Float[Array, "m ..."]:
    """Return x with something added to x[j]."""
    return jax.lax.dynamic_update_index_in_dim(x, pick(x, j) + new, j, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale: float, rate: float, *inputs: Any) -> Float[Array, "B T H V"]:
    return forward(scale, rate, *inputs)[0]


_attention.defvjp(forward, backward)


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
    """Average the values by softmax(scale q k), as `attention` does with all weights at hand.

    Args:
        query: what asks.
        key: what it is compared with.
        value: what is averaged.
        mask: where attention is allowed; a query that may attend nowhere attends evenly.
        scale: what dot products are multiplied by.
        rate: of dropout on the weights, which drops what `dropout` of the whole array drops.
        rng: dropout's key; without one nothing is dropped.
    """
    return _attention(scale, 0.0 if rng is None else rate, query, key, value, mask, rng)
