"""Build a model from a config. Only this file maps names in the config to Flax modules."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import (
    MultiHeadAttention,
    Score,
    dot_product,
    scaled_dot_product,
)
from transformer_jax.model.layers import AddAndNorm, Components, layer_norm
from transformer_jax.model.positions import AddLearnedPositions, AddPositions
from transformer_jax.model.transformer import Transformer
from transformer_jax.model.variants.attention_scores import Additive, General
from transformer_jax.model.variants.fused_attention import BlockwiseAttention, CudnnAttention
from transformer_jax.model.variants.positional_encodings import (
    AddClampedPositions,
    AddConcatenatedSinusoids,
    AddNothing,
)
from transformer_jax.model.variants.pre_norm import NormAndAdd
from transformer_jax.model.variants.relative_positions import (
    AlibiAttention,
    RelativeAttention,
    RotaryAttention,
)


class PositionScheme(NamedTuple):
    """How a model encodes positions: in the embeddings, or in self-attention."""

    add_positions: type[AddPositions]
    self_attention: type[MultiHeadAttention] | None = None
    """None selects the class of `model.attention_implementation`, which ignores positions."""


POSITION_SCHEMES = {
    "sinusoidal": PositionScheme(AddPositions),
    "concatenated_sinusoidal": PositionScheme(AddConcatenatedSinusoids),
    "learned": PositionScheme(AddLearnedPositions),
    "none": PositionScheme(AddNothing),
    "alibi": PositionScheme(AddNothing, AlibiAttention),
    "rotary": PositionScheme(AddNothing, RotaryAttention),
    "relative": PositionScheme(AddNothing, RelativeAttention),
}

ATTENTION_SCORES: dict[str, Callable[[ModelConfig], Score]] = {
    "scaled_dot_product": lambda _: scaled_dot_product,
    "dot_product": lambda _: dot_product,
    "general": General,
    "additive": Additive,
}

ATTENTION_IMPLEMENTATIONS = {
    "full": MultiHeadAttention,
    "blockwise": BlockwiseAttention,
    "cudnn": CudnnAttention,
}


class LayerNormPlacement(NamedTuple):
    """Where a model normalizes: around each sub-layer, and at the end of each stack."""

    residual: type[AddAndNorm]
    stack_norm: Callable[[ModelConfig], Callable[[Array], Array]]


LAYER_NORM_PLACEMENTS = {
    "post": LayerNormPlacement(AddAndNorm, lambda _: lambda x: x),
    "pre": LayerNormPlacement(NormAndAdd, layer_norm),
}


def choose_components(config: ModelConfig) -> Components:
    """Return the modules that the config names."""
    scheme = POSITION_SCHEMES[config.positions]
    if config.positions == "learned" and config.out_of_range_positions == "clamp":
        scheme = PositionScheme(AddClampedPositions)
    attention = ATTENTION_IMPLEMENTATIONS[config.attention_implementation]
    norms = LAYER_NORM_PLACEMENTS[config.layer_norm]
    return Components(
        add_positions=scheme.add_positions,
        self_attention=scheme.self_attention or attention,
        cross_attention=attention,
        score=ATTENTION_SCORES[config.attention_score],
        residual=norms.residual,
        stack_norm=norms.stack_norm,
    )


def build_transformer(
    config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None
) -> Transformer:
    """Make the model that the config describes.

    Equal arguments give equal models, so `jax.jit` compiles a function with a static model argument
    only once for both.

    Args:
        config: the architecture.
        vocab_size: the size of the shared vocabulary, or of the target vocabulary.
        source_vocab_size: the size of a separate source vocabulary; None if it is shared.
    """
    return Transformer(config, choose_components(config), vocab_size, source_vocab_size)
