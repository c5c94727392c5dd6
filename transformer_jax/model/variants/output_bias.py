"""A per-token bias in the linear layer before the softmax, as in Marian.

Differs from the paper, whose linear layer consists only of the embedding matrix (section 3.4).
Shapes: B batch, T positions, D d_model, N vocab_size.
"""

from flax import linen as nn
from jaxtyping import Array, Float

from transformer_jax.model.transformer import Transformer


class BiasedTransformer(Transformer):
    """A Transformer that adds a learned per-token bias to the logits."""

    def setup(self) -> None:
        super().setup()
        self.output_bias = self.param("output_bias", nn.initializers.zeros, (self.vocab_size,))

    def to_logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """Return the logits for the last decoder layer's output."""
        logits = super().to_logits(x)
        return logits + self.output_bias.astype(logits.dtype)[None, None]
