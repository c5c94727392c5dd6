"""Layers that recompute their activations in the backward pass instead of storing them."""

from flax import linen as nn

from transformer_jax.model.layers import DecoderLayer, EncoderLayer

# `static_argnums` contains the index of the Python bool `train`. Argument 0 is the module itself.
RematEncoderLayer = nn.remat(EncoderLayer, static_argnums=(3,))
RematDecoderLayer = nn.remat(DecoderLayer, static_argnums=(5,))
