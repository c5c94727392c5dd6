"""Cached decoding for models whose memory of earlier tokens has a fixed size.

A search keeps J hypotheses per sentence in J beam slots. When a hypothesis moves to another slot,
its carry moves too, whereas keys and values stay in the slot that computed them.

Shapes: B batch, S source positions, J hypotheses per sentence, L maximum length of a translation,
N vocab_size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from transformer_jax.architectures.incremental import Carry, IncrementalModel, PreparedSource
from transformer_jax.model.transformer import Params, source_mask


class DecodingState(NamedTuple):
    """The arrays that decoding carries from step to step."""

    carry: Carry
    """Arrays of shape [B, J, ...], with one row per hypothesis."""
    source: PreparedSource
    """Arrays of shape [B, ...] that all hypotheses for a sentence share."""


def init_decoding(
    model: IncrementalModel,
    params: Params,
    source: Int[Array, "B S"],
    *,
    num_hypotheses: int,
    max_length: int,  # noqa: ARG001 - the carry does not grow with the length.
) -> DecodingState:
    """Encode the source, and return the state before the first token."""
    bound = model.bind({"params": params})
    memory = bound.encode(source)
    carry = bound.initial_carry(memory, num_hypotheses)
    return DecodingState(carry, bound.prepare(memory, source_mask(source)))


def decode_step(
    model: IncrementalModel,
    params: Params,
    tokens: Int[Array, "B J"],
    position: Int[Array, ""],
    ancestors: Int[Array, "B J L"],
    state: DecodingState,
) -> tuple[Float[Array, "B J N"], DecodingState]:
    """Return the logits that `decode` would return at `position`, counted from 0.

    The arguments are the same as for `model.decoding.decode_step`.
    """
    # A hypothesis may have moved to another slot since the model read its previous token, but its
    # carry is still in the old slot. Before the first token, all carries are equal.
    parents = ancestors[:, :, jnp.maximum(position - 1, 0)]

    def move(x: Shaped[Array, "B J ..."]) -> Shaped[Array, "B J ..."]:
        index = parents.reshape(*parents.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    bound = model.bind({"params": params})
    carry = jax.tree.map(move, state.carry)
    logits, carry = bound.decode_position(tokens, position, carry, state.source)
    return logits, state._replace(carry=carry)
