"""Draw translations at random.

The Gumbel-max method draws each token: it adds Gumbel noise to the scaled logits and chooses the
token with the largest sum. The method draws each token with the probability that softmax assigns to
it. The noise is a function of the seed, the source's tokens, the number of the sample, and the
position. Therefore, neither the other sentences nor the number of devices affects a sample.

Shapes: B sentences, N tokens in the vocabulary.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.config.validation import COUNT, POSITIVE, ConfigSection, Rule, between
from transformer_jax.inference.search import NEG_INF, first_argmax
from transformer_jax.model.encoder_decoder import make_rng
from transformer_jax.special_tokens import BOS, PAD, UNKNOWN

# Label smoothing gives every token a probability, even the tokens that no target contains.
NEVER_DRAWN = (PAD, BOS, UNKNOWN)


@dataclass(frozen=True)
class Sampling(ConfigSection):
    """How to draw translations. Differs from the paper, which searches for the likeliest one.

    The temperature is applied first, then `top_k`, and then `top_p`.
    """

    temperature: Annotated[float, POSITIVE] = 1.0
    """The number that divides the logits. Below 1, likely tokens become more likely."""
    top_k: Annotated[int | None, COUNT] = None
    """Draw only from this many of the likeliest tokens (Fan et al. 2018). Default: all tokens."""
    top_p: Annotated[float, Rule("above 0 and at most 1", lambda x: 0 < x <= 1)] = 1.0
    """Draw only from the nucleus: the smallest set of the likeliest tokens whose total probability
    is at least this number (Holtzman et al. 2020)."""
    seed: Annotated[int, between(0, 2**31 - 1)] = 0
    """The seed of the noise, which also depends on the source and on the sample's number."""

    name = "sampling"


def identify_draw(seed: int, source: Sequence[int], sample: int) -> tuple[int, int, int]:
    """Return the numbers that determine the noise of one sample of a source."""
    digest = zlib.crc32(np.asarray(source, "<i4").tobytes())
    return seed, digest & 0x7FFFFFFF, sample


def draw_tokens(
    sampling: Sampling,
    draws: Int[Array, "B 3"],
    logits: Float[Array, "B N"],
    position: Int[Array, ""],
) -> Int[Array, " B"]:
    """Draw the token at `position` of each sentence. `identify_draw` returns a row of `draws`."""

    def draw_noise(draw: Int[Array, "3"]) -> Float[Array, " N"]:
        rng = make_rng(draw[0])
        for number in (draw[1], draw[2], position):
            rng = jax.random.fold_in(rng, number)
        return jax.random.gumbel(rng, logits.shape[1:])

    return first_argmax(scale_logits(logits, sampling) + jax.vmap(draw_noise)(draws))


def scale_logits(logits: Float[Array, "B N"], sampling: Sampling) -> Float[Array, "B N"]:
    """Return logits whose softmax is the distribution to draw from; -inf excludes a token."""
    # Subtracting the maximum prevents an overflow if the temperature is low.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    # A high temperature would otherwise give the forbidden tokens a probability.
    scaled = jnp.where(logits > NEG_INF / 2, scaled, -jnp.inf)
    if sampling.top_k is None and sampling.top_p == 1:
        return scaled
    top, tokens = jax.lax.top_k(scaled, min(sampling.top_k or scaled.shape[1], scaled.shape[1]))
    probabilities = jax.nn.softmax(top)
    # The nucleus includes the token with which its total reaches `top_p`. If `top_p` is 1, rounding
    # must not exclude the last tokens.
    limit = jnp.inf if sampling.top_p == 1 else sampling.top_p
    is_kept = jnp.cumsum(probabilities, axis=-1) - probabilities < limit
    rows = jnp.arange(len(scaled))[:, None]
    return jnp.full_like(scaled, -jnp.inf).at[rows, tokens].set(jnp.where(is_kept, top, -jnp.inf))
