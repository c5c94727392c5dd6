"""Build a Transformer from a config. Only this file maps config values to Transformer modules."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.config import ModelConfig
from transformer_jax.config.validation import checked
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
    FeedForward,
    MakeFeedForward,
    MakeNorm,
    layer_norm,
)
from transformer_jax.model.positions import AddLearnedPositions, AddPositions
from transformer_jax.model.transformer import Transformer
from transformer_jax.model.variants import relative_positions
from transformer_jax.model.variants.attention_window import WindowedAttention
from transformer_jax.model.variants.fused_attention import BlockwiseAttention, CudnnAttention
from transformer_jax.model.variants.sub_layers import (
    AddClampedPositions,
    AddConcatenatedSinusoids,
    Additive,
    AddNothing,
    BiasedTransformer,
    GatedFeedForward,
    General,
    NormAndAdd,
    rms_norm,
)
from transformer_jax.registry import Registry


class PositionScheme(NamedTuple):
    """How a Transformer encodes positions."""

    add_positions: type[AddPositions]
    """The module that adds positional encodings to the embeddings."""
    self_attention: type[MultiHeadAttention] | None = None
    """The self-attention that the scheme requires. If None, the scheme works with every attention
    implementation."""
    causal_self_attention: type[MultiHeadAttention] | None = None
    """The decoder's self-attention, if it differs from the encoder's."""


POSITIONS = Registry[PositionScheme]("model.positions")
for _name, _scheme in {
    "sinusoidal": PositionScheme(AddPositions),
    "concatenated_sinusoidal": PositionScheme(AddConcatenatedSinusoids),
    "learned": PositionScheme(AddLearnedPositions),
    "none": PositionScheme(AddNothing),
    "alibi": PositionScheme(AddNothing, relative_positions.AlibiAttention),
    "rotary": PositionScheme(AddNothing, relative_positions.RotaryAttention),
    "relative": PositionScheme(AddNothing, relative_positions.RelativeAttention),
    "t5": PositionScheme(
        AddNothing, relative_positions.T5Attention, relative_positions.CausalT5Attention
    ),
}.items():
    POSITIONS.register(_name)(_scheme)

SCORES = Registry[MakeScore]("model.attention_score")
SCORES.register("scaled_dot_product")(lambda _: scaled_dot_product)
SCORES.register("dot_product")(lambda _: dot_product)
SCORES.register("general")(lambda _: General())
SCORES.register("additive")(lambda _: Additive())

ATTENTIONS = Registry[type[MultiHeadAttention]]("model.attention_implementation")
ATTENTIONS.register("full")(MultiHeadAttention)
ATTENTIONS.register("blockwise")(BlockwiseAttention)
ATTENTIONS.register("cudnn")(CudnnAttention)

ACTIVATIONS = Registry[Activation]("model.activation")
ACTIVATIONS.register("relu")(nn.relu)
ACTIVATIONS.register("gelu")(partial(nn.gelu, approximate=False))
ACTIVATIONS.register("swish")(nn.swish)

FEED_FORWARDS = Registry[MakeFeedForward]("model.feed_forward")
FEED_FORWARDS.register("mlp")(lambda c: FeedForward(c, ACTIVATIONS[c.activation]))
FEED_FORWARDS.register("swiglu")(lambda c: GatedFeedForward(c, ACTIVATIONS["swish"]))
FEED_FORWARDS.register("geglu")(lambda c: GatedFeedForward(c, ACTIVATIONS["gelu"]))

NORMS = Registry[MakeNorm]("model.norm")
NORMS.register("layer_norm")(layer_norm)
NORMS.register("rms_norm")(rms_norm)

RESIDUALS = Registry[type[AddAndNorm]]("model.layer_norm")
RESIDUALS.register("post")(AddAndNorm)
RESIDUALS.register("pre")(NormAndAdd)

# These layers recompute their activations in the backward pass instead of storing them.
# `static_argnums` contains the index of the Python bool `train`. Argument 0 is the module itself.
RematEncoderLayer = nn.remat(EncoderLayer, static_argnums=(3,))
RematDecoderLayer = nn.remat(DecoderLayer, static_argnums=(5,))


def choose_components(config: ModelConfig) -> Components:
    """Return the modules that the config selects."""
    scheme = POSITIONS[config.positions]
    add_positions = scheme.add_positions
    if config.positions == "learned" and config.out_of_range_positions == "clamp":
        add_positions = AddClampedPositions
    attention = ATTENTIONS[config.attention_implementation]
    # The config rejects an attention window if the position scheme requires its own self-attention.
    window = None if config.attention_window is None else WindowedAttention
    self_attention = scheme.self_attention or window or attention
    return Components(
        add_positions=add_positions,
        self_attention=self_attention,
        causal_self_attention=scheme.causal_self_attention or self_attention,
        cross_attention=attention,
        make_score=SCORES[config.attention_score],
        feed_forward=FEED_FORWARDS[config.feed_forward],
        norm=NORMS[config.norm],
        residual=RESIDUALS[config.layer_norm],
        encoder_layer=RematEncoderLayer if config.remat else EncoderLayer,
        decoder_layer=RematDecoderLayer if config.remat else DecoderLayer,
    )


def check_dtype(config: ModelConfig) -> None:
    """Raise a ConfigError if JAX's 64-bit types are disabled and the config needs them."""
    is_possible = config.dtype != "float64" or jnp.result_type(float) == "float64"
    config.require("dtype", is_possible, "float32 or bfloat16 outside `jax.enable_x64(True)`")


@checked
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
