"""The interface between cached decoding and a model that decodes position by position.

Shapes: B batch, S source positions, J hypotheses per sentence, D d_model, N vocab_size.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.transformer import EncoderDecoder

Carry = Any
"""What a decoder remembers about the tokens so far: a pytree of arrays of shape [B, J, ...]."""


class IncrementalModel(EncoderDecoder):
    """An encoder-decoder whose memory of earlier tokens has a fixed size."""

    def prepare(self, memory: Any, memory_mask: Bool[Array, "B 1 1 S"]) -> Any:
        """Precompute the source data that every target position reads."""
        raise NotImplementedError

    def initial_carry(self, memory: Any, num_hypotheses: int) -> Carry:
        """Return the carry before the first token."""
        raise NotImplementedError

    def decode_position(
        self, tokens: Int[Array, "B J"], position: Int[Array, ""], carry: Carry, source: Any
    ) -> tuple[Float[Array, "B J N"], Carry]:
        """Read one token per hypothesis; return the next token's logits and the new carry."""
        raise NotImplementedError
