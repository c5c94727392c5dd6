"""Build a Transformer from a config. Only this file maps config values to Transformer modules."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import (
    MakeScore,
    MultiHeadAttention,
    dot_product,
    scaled_dot_product,
)
from transformer_jax.model.layers import (
    Activation,
    AddAndNorm,
    Components,
    DecoderLayer,
    EncoderLayer,
)
from transformer_jax.model.positions import AddLearnedPositions, AddPositions
from transformer_jax.model.transformer import Transformer
from transformer_jax.model.variants import positional_encodings, relative_positions
from transformer_jax.model.variants.attention_scores import Additive, General
from transformer_jax.model.variants.attention_window import WindowedAttention
from transformer_jax.model.variants.fused_attention import BlockwiseAttention, CudnnAttention
from transformer_jax.model.variants.output_bias import BiasedTransformer
from transformer_jax.model.variants.pre_norm import NormAndAdd
from transformer_jax.model.variants.remat import RematDecoderLayer, RematEncoderLayer

POSITION_SCHEMES: dict[str, tuple[type[AddPositions], type[MultiHeadAttention] | None]] = {
    # Each value is a pair: the module that adds positional encodings to the embeddings, and the
    # self-attention module that the scheme requires. If the second item is None, the scheme works
    # with every attention implementation.
    "sinusoidal": (AddPositions, None),
    "concatenated_sinusoidal": (positional_encodings.AddConcatenatedSinusoids, None),
    "learned": (AddLearnedPositions, None),
    "none": (positional_encodings.AddNothing, None),
    "alibi": (positional_encodings.AddNothing, relative_positions.AlibiAttention),
    "rotary": (positional_encodings.AddNothing, relative_positions.RotaryAttention),
    "relative": (positional_encodings.AddNothing, relative_positions.RelativeAttention),
    "t5": (positional_encodings.AddNothing, relative_positions.T5Attention),
}

# The decoder's self-attention, for position schemes in which it differs from the encoder's.
CAUSAL_SELF_ATTENTION = {"t5": relative_positions.CausalT5Attention}

ATTENTION_SCORES: dict[str, MakeScore] = {
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

ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.relu,
    "gelu": partial(nn.gelu, approximate=False),
    "swish": nn.swish,
}

LAYER_NORM_PLACEMENTS = {"post": AddAndNorm, "pre": NormAndAdd}


def choose_components(config: ModelConfig) -> Components:
    """Return the modules that the config selects."""
    add_positions, required_attention = POSITION_SCHEMES[config.positions]
    if config.positions == "learned" and config.out_of_range_positions == "clamp":
        add_positions = positional_encodings.AddClampedPositions
    attention = ATTENTION_IMPLEMENTATIONS[config.attention_implementation]
    # The config rejects an attention window if the position scheme requires its own self-attention.
    window = None if config.attention_window is None else WindowedAttention
    self_attention = required_attention or window or attention
    return Components(
        add_positions=add_positions,
        self_attention=self_attention,
        causal_self_attention=CAUSAL_SELF_ATTENTION.get(config.positions, self_attention),
        cross_attention=attention,
        make_score=ATTENTION_SCORES[config.attention_score],
        activation=ACTIVATIONS[config.activation],
        residual=LAYER_NORM_PLACEMENTS[config.layer_norm],
        encoder_layer=RematEncoderLayer if config.remat else EncoderLayer,
        decoder_layer=RematDecoderLayer if config.remat else DecoderLayer,
    )


def check_dtype(config: ModelConfig) -> None:
    """Raise a ConfigError if JAX's 64-bit types are disabled and the config needs them."""
    is_possible = config.dtype != "float64" or jnp.result_type(float) == "float64"
    config.require("dtype", is_possible, "float32 or bfloat16 outside of `jax.enable_x64(True)`")


def build_transformer(
    config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None
) -> Transformer:
    """Build the Transformer that the config describes.

    `EncoderDecoder` explains the vocabulary sizes. Models that are built from equal arguments
    compare equal, so `jax.jit` compiles each of the model's functions only once.

    Raises:
        ConfigError: the architecture is not `transformer`, or the dtype is float64 and JAX's 64-bit
            types are disabled.
    """
    config.require("architecture", config.architecture == "transformer", "transformer")
    check_dtype(config)
    components = choose_components(config)
    transformer = BiasedTransformer if config.output_bias else Transformer
    return transformer(config, vocab_size, source_vocab_size, components=components)
