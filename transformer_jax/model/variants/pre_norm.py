"""Layer normalization before each sub-layer instead of after it (Xiong et al. 2020).

Differs from the paper: the residual path through a stack is not normalized, so each stack ends with
one more layer normalization.
Shapes: B batch, T positions, D d_model.
"""

from jaxtyping import Array, Float

from transformer_jax.model.dropout import Dropout
from transformer_jax.model.layers import AddAndNorm, layer_norm


class NormAndAdd(AddAndNorm):
    """Computes x + Dropout(Sublayer(LayerNorm(x))). Differs from the paper."""

    def setup(self) -> None:
        """Make the layer normalization and the dropout."""
        self.norm = layer_norm(self.config)
        self.dropout = Dropout(self.config.dropout)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of the sub-layer: LayerNorm(x)."""
        return self.norm(x)

    def leave(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        """Add the output y of the sub-layer to x."""
        return x + self.dropout(y, train=train)
