"""Normalization before each sub-layer and after each stack (Xiong et al. 2020).

Differs from the paper, which normalizes after each sub-layer.
Shapes: B batch, T positions, D d_model.
"""

from collections.abc import Callable

from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import Dropout
from transformer_jax.model.layers import AddAndNorm, MakeNorm


class NormAndAdd(AddAndNorm):
    """x + Dropout(Sublayer(Norm(x)))."""

    def setup(self) -> None:
        self.norm = self.make_norm(self.config)
        self.dropout = Dropout(self.config.dropout)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the sub-layer's input: Norm(x)."""
        return self.norm(x)

    def leave(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], *, train: bool = False
    ) -> Float[Array, "B T D"]:
        """Add the sub-layer's output y to x."""
        return x + self.dropout(y, train=train)

    @staticmethod
    def make_final_norm(config: ModelConfig, make_norm: MakeNorm, /) -> Callable[[Array], Array]:
        """Return a normalization module to apply after the last layer of each stack."""
        return make_norm(config)
