"""Self-attention that depends on the distance between the query and the key.

These schemes differ from the paper: they do not add anything to the embeddings. Attention to the
encoder's output is the same as in the paper, because a distance between positions in different
sentences is meaningless.
Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v, R max_relative_position.
"""

import math
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.model.attention import Heads, MultiHeadAttention, Positions, weighted_sum
from transformer_jax.model.operations import sum_dtype

# T5 assigns this distance and all longer distances to the last bucket for their direction.
T5_MAX_DISTANCE = 128


def relative_positions(positions: Positions) -> Int[Array, "T S"]:
    """Return k - q for each query position q and key position k."""
    return positions.keys[None] - positions.queries[:, None]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope for each head: 2^(-8/n), 2^(-16/n), ..., 2^-8 for n heads.

    If n is not a power of two, let p be the largest power of two below n. The first p slopes are
    the slopes for p heads. The other n - p slopes are every second slope for 2 p heads, starting
    with the first.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    return slopes + [2 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power), 2)]


class AlibiAttention(MultiHeadAttention):
    """Attention with linear biases (ALiBi, Press et al. 2022).

    This class subtracts the distance times the head's slope from each score. The authors give no
    formula for the encoder, so the class uses the same slope in both directions.
    """

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        distance = jnp.abs(relative_positions(heads.positions))
        slope = jnp.asarray(alibi_slopes(self.config.num_heads))[None, :, None, None]
        scores = self.score(heads.query, heads.key) - slope * distance[None, None]
        return weighted_sum(self.to_weights(scores, heads.mask, train=train), heads.value)


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, " T"]) -> Float[Array, "B T H K"]:
    """Rotate components 2i and 2i + 1 at position pos by the angle pos / 10000^(2i / d_k).

    The angles are the same as in the paper's sinusoids. `d_k` must be even.
    """
    d_k, dtype = x.shape[-1], sum_dtype(x)
    timescale = 10000.0 ** (jnp.arange(0, d_k, 2, dtype=dtype) / d_k)
    angles = positions[None, :, None, None].astype(dtype) / timescale[None, None, None]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


class RotaryAttention(MultiHeadAttention):
    """Attention with queries and keys rotated by position (RoFormer, Su et al. 2021, equation 34).

    After the rotation, the dot product depends on the positions only through the distance between
    them. During decoding, each step rotates all stored keys.
    """

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        query = rotate(heads.query, heads.positions.queries)
        key = rotate(heads.key, heads.positions.keys)
        return super().attend_heads(heads._replace(query=query, key=key), train)


class RelativeAttention(MultiHeadAttention):
    """Attention with learned vectors for each distance (Shaw et al. 2018).

    The class implements equations 3 to 5: for each distance, it adds one vector to the key and
    another to the value. All heads share the same vectors. By default, Tensor2Tensor's later
    `dot_product_relative_v2` omits the value vectors.
    """

    def setup(self) -> None:
        super().setup()
        c = self.config
        init, rows = nn.initializers.xavier_uniform(), 2 * c.max_relative_position + 1
        self.relative_key = self.param("relative_key", init, (rows, c.d_k))
        self.relative_value = self.param("relative_value", init, (rows, c.d_v))

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        """Compute scores q (k + a) and averages of v + b, where a and b depend on the distance.

        Because q (k + a) = q k + q a, this method computes q a only once for each distance.
        """
        query, key, value, mask, positions = heads
        limit = self.config.max_relative_position
        rows = jnp.clip(relative_positions(positions), -limit, limit) + limit

        table = self.relative_key.astype(key.dtype)[None, :, None]
        table = jnp.broadcast_to(table, (len(key), table.shape[1], *key.shape[2:]))
        relative_scores = jnp.take_along_axis(self.score(query, table), rows[None, None], axis=-1)
        scores = self.score(query, key) + relative_scores

        weights = self.to_weights(scores, mask, train=train)
        vectors = self.relative_value.astype(value.dtype)[rows]
        relative = jnp.einsum("bhts,tsv->bthv", weights.astype(value.dtype), vectors)
        return weighted_sum(weights, value) + relative


def bucket_starts(num_buckets: int) -> list[int]:
    """Return the smallest distance in each of T5's buckets for one direction.

    Each bucket in the first half contains one distance. The other buckets are spaced
    logarithmically up to a distance of `T5_MAX_DISTANCE`.
    """
    exact = num_buckets // 2
    grown, ratio = num_buckets - exact, T5_MAX_DISTANCE / exact
    return [*range(exact), *(math.ceil(exact * ratio ** (i / grown)) for i in range(grown))]


class T5Attention(MultiHeadAttention):
    """Attention whose scores have a learned bias per head and distance bucket (T5, Raffel et al.).

    Half of the buckets are for keys after the query. Unlike in T5, the layers of a stack do not
    share their biases. T5 also does not scale the dot product; to match T5, set
    `model.attention_score` to dot_product.
    """

    is_causal: ClassVar[bool] = False

    def setup(self) -> None:
        super().setup()
        shape = self.config.position_buckets, self.config.num_heads
        self.bias = self.param("bias", nn.initializers.xavier_uniform(), shape)

    def attend_heads(self, heads: Heads, train: bool, /) -> Float[Array, "B T H V"]:
        bias = self.bias[self.to_buckets(heads.positions)].transpose(2, 0, 1)
        scores = self.score(heads.query, heads.key) + bias[None]
        return weighted_sum(self.to_weights(scores, heads.mask, train=train), heads.value)

    def to_buckets(self, positions: Positions) -> Int[Array, "T S"]:
        """Return the bucket for each query-key pair."""
        distance, num_buckets = relative_positions(positions), self.config.position_buckets
        if self.is_causal:
            return _find_bucket(jnp.maximum(-distance, 0), num_buckets)
        half = num_buckets // 2
        return jnp.where(distance > 0, half, 0) + _find_bucket(jnp.abs(distance), half)


class CausalT5Attention(T5Attention):
    """Attention as in T5's decoder, which does not need buckets for keys after the query."""

    is_causal: ClassVar[bool] = True


def _find_bucket(distance: Int[Array, "T S"], num_buckets: int) -> Int[Array, "T S"]:
    starts = jnp.asarray(bucket_starts(num_buckets))
    return jnp.searchsorted(starts, distance, side="right") - 1
