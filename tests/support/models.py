"""Small models for the tests of `transformer_jax.model`, and two sentence pairs as their input."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from oracles import SMALL, drawn_params

from transformer_jax.baselines.build import build_model
from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.model.build import choose_components
from transformer_jax.model.layers import DecoderLayer, EncoderLayer
from transformer_jax.special_tokens import EOS, PAD

VOCABULARY = 13
SOURCE = jnp.asarray([[5, 9, 3, 12, 7, EOS], [4, 11, 6, EOS, PAD, PAD]])
TARGET = jnp.asarray([[8, 3, 10, 5, EOS], [12, 4, EOS, PAD, PAD]])


def make_model(**changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a variant of `SMALL` and its parameters; by default, each stack has one layer."""
    changes.setdefault("num_layers", 1)
    model, params = _draw(replace(SMALL, **changes))
    # Copy the parameter tree, so that a test can change it without affecting other tests.
    return model, jax.tree.map(lambda array: array, params)


@functools.cache
def _draw(config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Return a model and random parameters, cached because tracing the model is slow."""
    model = build_model(config, VOCABULARY)
    return model, drawn_params(model, SOURCE, TARGET)


def make_self_attention(config: ModelConfig) -> MultiHeadAttention:
    """Return a self-attention module for the given config."""
    components = choose_components(config)
    return components.self_attention(config, components.make_score)


def make_encoder_layer(config: ModelConfig) -> EncoderLayer:
    """Return an encoder layer for the given config."""
    return EncoderLayer(config, choose_components(config))


def make_decoder_layer(config: ModelConfig) -> DecoderLayer:
    """Return a decoder layer for the given config."""
    return DecoderLayer(config, choose_components(config))
