"""The interface between cached decoding and a model that decodes position by position.

Shapes: B batch, S source positions, J hypotheses per sentence, D d_model, N vocab_size.
"""

from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from transformer_jax.model.transformer import EncoderDecoder, EncoderOutput

Carry = PyTree[Shaped[Array, "B J ..."]]
"""What a decoder remembers about the tokens so far, with one row per hypothesis."""
PreparedSource = PyTree[Shaped[Array, "B ..."]]
"""The source data that every target position reads, which all hypotheses of a sentence share."""


class IncrementalModel(EncoderDecoder):
    """An encoder-decoder whose memory of earlier tokens has a fixed size."""

    def prepare(self, memory: EncoderOutput, memory_mask: Bool[Array, "B 1 1 S"]) -> PreparedSource:
        """Precompute the source data that every target position reads."""
        raise NotImplementedError

    def initial_carry(self, memory: EncoderOutput, num_hypotheses: int) -> Carry:
        """Return the carry before the first token."""
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
