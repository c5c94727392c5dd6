"""Self-attention that is told how far apart a query and a key stand.

The paper adds positions to embeddings; these schemes add nothing there. Each is a kind of
`MultiHeadAttention` that compares, and where it says so averages, in its own way, and an entry of
`SELF_ATTENTIONS`. Attention to the encoder's output stays the paper's, as in the literature: a
place in one sentence has no distance from a place in another.
Shapes: B batch, T queries, S keys, H heads, K d_k, V d_v, R max_relative_position.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer_jax.model.attention import MultiHeadAttention, Places, weighted_sum


def distances(places: Places) -> Int[Array, "T S"]:
    """Return how far after each query each key stands; before it, a negative number."""
    return places.keys - places.queries[:, None]


def slopes(num_heads: int) -> list[float]:
    """Return a slope for each head of ALiBi: 2^(-8/n), 2^(-16/n), ... 2^-8 for n heads.

    Where n is no power of two, as its authors do: those of the next lower power, then every
    second one of its double.
    """

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * head / n) for head in range(1, n + 1)]

    power = 1 << (num_heads.bit_length() - 1)
    return geometric(power) + geometric(2 * power)[::2][: num_heads - power]


class Alibi(MultiHeadAttention):
    """The further apart, the lower the score, for each head by its slope (Press et al. 2022).

    In the encoder, for which they give no formula, the distance counts alike to both sides.
    Differs from the paper.
    """

    def compare(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], places: Places
    ) -> Float[Array, "B H T S"]:
        """Score a key that is d positions away as the paper does, less slope times d."""
        distance = jnp.abs(distances(places))
        slope = jnp.asarray(slopes(self.config.num_heads))[:, None, None]
        return super().compare(query, key, places) - slope * distance


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, " T"]) -> Float[Array, "B T H K"]:
    """Turn components 2i and 2i + 1 of a vector at position pos by pos / 10000^(2i / d_k).

    The angles are the paper's sinusoids'. `d_k` must be even.
    """
    d_k = x.shape[-1]
    wavelength = 10000.0 ** (jnp.arange(0, d_k, 2, dtype=jnp.float32) / d_k)
    angles = positions[:, None, None].astype(jnp.float32) / wavelength
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


class Rotary(MultiHeadAttention):
    """Queries and keys are turned by their positions: a dot product tells the distance.

    RoFormer (Su et al. 2021), equation 34. Differs from the paper.
    """

    def compare(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], places: Places
    ) -> Float[Array, "B H T S"]:
        """Turn both, then score as the paper does."""
        return super().compare(rotate(query, places.queries), rotate(key, places.keys), places)


class Relative(MultiHeadAttention):
    """A trained vector for each distance joins the keys, another the values (Shaw et al. 2018).

    Equations 3 to 5. Distances are clipped at `max_relative_position`; each layer has its own
    vectors, for all heads. Tensor2Tensor's later `dot_product_relative_v2` leaves the values'
    out by default. Differs from the paper.
    """

    def setup(self) -> None:
        super().setup()
        c = self.config
        init, rows = nn.initializers.xavier_uniform(), 2 * c.max_relative_position + 1
        self.relative_key = self.param("relative_key", init, (rows, c.d_k))
        self.relative_value = self.param("relative_value", init, (rows, c.d_v))

    def rows(self, places: Places) -> Int[Array, "T S"]:
        """Return which vector of the 2R + 1 each pair of query and key has."""
        most = self.config.max_relative_position
        return jnp.clip(distances(places), -most, most) + most

    def compare(
        self, query: Float[Array, "B T H K"], key: Float[Array, "B S H K"], places: Places
    ) -> Float[Array, "B H T S"]:
        """Return q (k + a), which is q k + q a, scaled: the second once for each distance."""
        table = self.relative_key.astype(key.dtype)[None, :, None]
        table = jnp.broadcast_to(table, (len(key), table.shape[1], *key.shape[2:]))
        by_distance = super().compare(query, table, places)
        rows = self.rows(places)
        relative = jnp.take_along_axis(by_distance, rows[None, None], axis=-1)
        return super().compare(query, key, places) + relative

    def mix(
        self, weights: Float[Array, "B H T S"], value: Float[Array, "B S H V"], places: Places
    ) -> Float[Array, "B T H V"]:
        """Average v + a by the weights."""
        vectors = self.relative_value.astype(value.dtype)
        vectors = vectors[self.rows(places)]
        relative = jnp.einsum("bhts,tsv->bthv", weights.astype(value.dtype), vectors)
        return weighted_sum(weights, value) + relative


SELF_ATTENTIONS: dict[str, type[MultiHeadAttention]] = {
    "sinusoidal": MultiHeadAttention,
    "concatenated_sinusoidal": MultiHeadAttention,
    "learned": MultiHeadAttention,
    "none": MultiHeadAttention,
    "alibi": Alibi,
    "rotary": Rotary,
    "relative": Relative,
}
