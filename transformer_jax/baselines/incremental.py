"""Cached decoding for models whose decoder state has a fixed size.

A search keeps J hypotheses per sentence in J beam slots. When a hypothesis moves to another slot,
its decoder state (the carry) moves too. In contrast, a Transformer's keys and values stay in the
slot where they were computed.

Shapes: B batch, S source positions, T target positions, J hypotheses per sentence, L maximum
translation length, N vocab_size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from transformer_jax.model.encoder_decoder import EncoderDecoder, EncoderOutput
from transformer_jax.model.masks import source_mask

Carry = PyTree[Shaped[Array, "B J ..."]]
"""The decoder's state after the tokens that it has read so far, with one row per hypothesis."""
PreparedSource = PyTree[Shaped[Array, "B ..."]]
"""The source data that the decoder reads at every target position, shared by all hypotheses."""


class DecodingState(NamedTuple):
    """The arrays that are carried from one decoding step to the next."""

    carry: Carry
    source: PreparedSource


class IncrementalModel(EncoderDecoder):
    """An encoder-decoder whose decoder state has a fixed size."""

    def prepare(self, memory: EncoderOutput, memory_mask: Bool[Array, "B 1 1 S"]) -> PreparedSource:
        """Precompute the source data that the decoder reads at every target position."""
        raise NotImplementedError

    def initial_carry(self, memory: EncoderOutput, num_hypotheses: int) -> Carry:
        """Return the decoder's state before the first token."""
        raise NotImplementedError

    def decode_position(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        carry: Carry,
        source: PreparedSource,
    ) -> tuple[Float[Array, "B J N"], Carry]:
        """Read one token per hypothesis; return the next token's logits and the new carry."""
        raise NotImplementedError

    def init_decoding(
        self,
        source: Int[Array, "B S"],
        *,
        num_hypotheses: int,
        max_length: int,  # noqa: ARG002 - the carry does not grow with the length.
    ) -> DecodingState:
        memory = self.encode(source)
        carry = self.initial_carry(memory, num_hypotheses)
        return DecodingState(carry, self.prepare(memory, source_mask(source)))

    def decode_step(
        self,
        tokens: Int[Array, "B J"],
        position: Int[Array, ""],
        ancestors: Int[Array, "B J L"],
        state: DecodingState,
    ) -> tuple[Float[Array, "B J N"], DecodingState]:
        # A hypothesis might have moved to another slot since the model read its previous token, but
        # its carry is still in the old slot. Before the first token, all hypotheses for a sentence
        # have the same carry.
        parents = ancestors[:, :, jnp.maximum(position - 1, 0)]

        def move(x: Shaped[Array, "B J ..."]) -> Shaped[Array, "B J ..."]:
            index = parents.reshape(*parents.shape, *[1] * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1)

        carry = jax.tree.map(move, state.carry)
        logits, carry = self.decode_position(tokens, position, carry, state.source)
        return logits, state._replace(carry=carry)
