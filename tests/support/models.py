"""Small models, with masks and two sentence pairs as input, and PyTorch layers for comparison."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike
from oracles import SMALL_MODEL, drawn_params

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
    """Return a variant of `SMALL_MODEL` and its parameters. Stacks have one layer by default."""
    changes.setdefault("num_layers", 1)
    model, params = _draw(replace(SMALL_MODEL, **changes))
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


BATCH, TARGETS, SOURCES, WIDTH = 2, 5, 6, SMALL_MODEL.d_model


def is_source_token() -> Array:
    """Return the source mask for two sentences. The second sentence is two tokens shorter."""
    return jnp.arange(SOURCES)[None, None, None] < jnp.asarray([6, 4])[:, None, None, None]


def causal() -> Array:
    return jnp.tril(jnp.ones((1, 1, TARGETS, TARGETS), bool))


def norm_params(norm: Any) -> dict[str, Array]:
    return {"scale": as_array(norm.weight), "bias": as_array(norm.bias)}


def attention_params(attention: Any, config: ModelConfig) -> dict[str, dict[str, Array]]:
    """Return the parameters of a `torch.nn.MultiheadAttention` under the names of this package."""
    heads = config.num_heads
    params: dict[str, dict[str, Array]] = {}
    matrices = np.split(as_array(attention.in_proj_weight), 3)
    biases = np.split(as_array(attention.in_proj_bias), 3)
    for name, matrix, bias in zip(("query", "key", "value"), matrices, biases, strict=True):
        params[name] = {"kernel": jnp.asarray(matrix.T.reshape(WIDTH, heads, -1))}
        if config.attention_bias:
            params[name]["bias"] = jnp.asarray(bias.reshape(heads, -1))
    matrix = as_array(attention.out_proj.weight)
    params["output"] = {"kernel": matrix.T.reshape(heads, -1, WIDTH)}
    if config.attention_bias:
        params["output"]["bias"] = as_array(attention.out_proj.bias)
    return params


def feed_forward_params(layer: Any) -> dict[str, dict[str, Array]]:
    linears = {"inner": layer.linear1, "outer": layer.linear2}
    return {
        name: {"kernel": as_array(linear.weight).T, "bias": as_array(linear.bias)}
        for name, linear in linears.items()
    }


def as_array(tensor: Any) -> Array:
    return jnp.asarray(tensor.detach().numpy())


def torch_layer(torch: Any, kind: str, config: ModelConfig) -> Any:
    """Return a PyTorch layer with random parameters. Unused attention biases are zero."""
    layer = getattr(torch.nn, kind)(
        WIDTH,
        config.num_heads,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        activation="relu",
        layer_norm_eps=config.layer_norm_epsilon,
        batch_first=True,
        norm_first=False,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            is_attention_bias = "attn" in name and name.endswith("bias")
            if is_attention_bias and not config.attention_bias:
                parameter.zero_()
            else:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return layer


def disallowed(torch: Any, allowed: ArrayLike) -> Any:
    """Return a mask for PyTorch, in which True means that attention is not allowed."""
    return torch.from_numpy(~np.array(allowed))
