"""The paper's equations as NumPy loops in float64, and helpers for testing modules.

From the package, this module imports only the config. Parameters are nested dictionaries, as in
Flax.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from hypothesis import settings
from jaxtyping import Array
from numpy.typing import ArrayLike, NDArray

from transformer_jax.config import ModelConfig

Floats = NDArray[np.float64]
Params = Mapping[str, Any]

SMALL_MODEL = ModelConfig(
    num_layers=2, d_model=16, d_ff=32, num_heads=2, d_k=8, d_v=8, dropout=0.5, max_length=32
)
"""A small model with a dropout rate high enough to have a measurable effect."""


def examples(count: int) -> settings:
    """Return Hypothesis settings that generate the same `count` examples in every run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def normal(seed: int, *shape: int) -> Array:
    """Draw numbers from N(0, 1) with NumPy, which does not need compilation."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def coins(seed: int, share: float, *shape: int) -> Array:
    """Draw booleans, each of which is True with probability `share`."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


def initial_params(module: nn.Module, *arguments: ArrayLike, method: str = "__call__") -> Any:
    """Initialize a module and return its parameters."""
    return module.init(jax.random.key(0), *arguments, method=method)["params"]


def drawn_params(
    module: nn.Module, *arguments: ArrayLike, seed: int = 0, method: str = "__call__"
) -> dict[str, Any]:
    """Draw all parameters at random, including those that the module initializes to zero or one."""
    shapes = jax.eval_shape(lambda: initial_params(module, *arguments, method=method))
    seeds = itertools.count(1000 * seed)

    def draw(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        around = 1.0 if path[-1].key == "scale" else 0.0
        return around + 0.4 * normal(next(seeds), *shape.shape)

    return jax.tree_util.tree_map_with_path(draw, shapes)


STATIC = ("method", "train", "mutable")


@functools.partial(jax.jit, static_argnums=0, static_argnames=STATIC)
def apply(
    module: nn.Module,
    params: Params,
    *arguments: ArrayLike,
    rng: Array | None = None,
    **options: Any,
) -> Any:
    """Compile and call a method of the module, `__call__` by default."""
    rngs = None if rng is None else {"dropout": rng}
    return module.apply({"params": params}, *arguments, rngs=rngs, **options)


def floats(x: ArrayLike) -> Floats:
    """Return the array as a float64 NumPy array."""
    return np.asarray(x, np.float64)


def softmax(scores: Floats) -> Floats:
    """Return exp(scores) divided by its sum."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: ArrayLike, *, scale: float
) -> tuple[Floats, Floats]:
    """Compute attention weights [B, H, T, S] and outputs [B, T, H, V], one query at a time."""
    q, k, v = floats(query), floats(key), floats(value)
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    allowed = np.broadcast_to(np.asarray(mask), (batch, heads, queries, keys))
    weights = np.zeros(allowed.shape)
    mixed = np.zeros((batch, queries, heads, v.shape[-1]))
    for b, h, t in np.ndindex(batch, heads, queries):
        seen = np.flatnonzero(allowed[b, h, t])
        if len(seen):
            scores = floats([sum(q[b, t, h] * k[b, s, h]) * scale for s in seen])
            weights[b, h, t, seen] = softmax(scores)
        else:
            weights[b, h, t] = 1 / keys
        mixed[b, t, h] = sum(weights[b, h, t, s] * v[b, s, h] for s in range(keys))
    return weights, mixed


def multi_head_attention(
    params: Params, x: ArrayLike, memory: ArrayLike, mask: ArrayLike, *, scale: float | None = None
) -> Floats:
    """Compute Concat(head_1, ..., head_h) W^O, one head at a time (section 3.2.2)."""
    return _attend(params, x, memory, mask, scale)[1]


def multi_head_weights(params: Params, x: ArrayLike, memory: ArrayLike, mask: ArrayLike) -> Floats:
    """Return the attention weights of each head, [B, H, T, S]."""
    return _attend(params, x, memory, mask, None)[0]


def _attend(
    params: Params, x: ArrayLike, memory: ArrayLike, mask: ArrayLike, scale: float | None
) -> tuple[Floats, Floats]:
    x, memory = floats(x), floats(memory)
    _, heads, d_k = params["query"]["kernel"].shape
    d_v, d_model = params["output"]["kernel"].shape[1:]
    scale = d_k**-0.5 if scale is None else scale
    allowed = np.broadcast_to(np.asarray(mask), (len(x), heads, x.shape[1], memory.shape[1]))
    heads_weights: list[Floats] = []
    concatenated: list[Floats] = []
    for h in range(heads):
        q, k, v = (
            y @ floats(p["kernel"])[:, h] + (floats(p["bias"])[h] if "bias" in p else 0.0)
            for y, p in ((x, params["query"]), (memory, params["key"]), (memory, params["value"]))
        )
        weights, mixed = attention(
            q[:, :, None], k[:, :, None], v[:, :, None], allowed[:, h : h + 1], scale=scale
        )
        heads_weights.append(weights[:, 0])
        concatenated.append(mixed[:, :, 0])
    matrix = floats(params["output"]["kernel"]).reshape(heads * d_v, d_model)
    bias = floats(params["output"]["bias"]) if "bias" in params["output"] else 0.0
    return np.stack(heads_weights, axis=1), np.concatenate(concatenated, axis=-1) @ matrix + bias


def layer_norm(params: Params, x: ArrayLike, *, epsilon: float = 1e-6) -> Floats:
    """Normalize each position's vector to mean 0 and variance 1, then scale and shift it."""
    x, result = floats(x), np.zeros(np.shape(x))
    for index in np.ndindex(x.shape[:-1]):
        vector = x[index]
        normed = (vector - vector.mean()) / math.sqrt(vector.var() + epsilon)
        result[index] = normed * floats(params["scale"]) + floats(params["bias"])
    return result


def feed_forward(params: Params, x: ArrayLike) -> Floats:
    """Return max(0, x W1 + b1) W2 + b2 (equation 2)."""
    inner, outer = params["inner"], params["outer"]
    hidden = np.maximum(0, floats(x) @ floats(inner["kernel"]) + floats(inner["bias"]))
    return hidden @ floats(outer["kernel"]) + floats(outer["bias"])


def encoder_layer(params: Params, x: ArrayLike, mask: ArrayLike) -> Floats:
    """Apply the encoder layer: LayerNorm(x + Sublayer(x)) for each of two sub-layers."""
    x = floats(x)
    attended = multi_head_attention(params["self_attention"], x, x, mask)
    x = layer_norm(params["after_self_attention"]["norm"], x + attended)
    fed = feed_forward(params["feed_forward"], x)
    return layer_norm(params["after_feed_forward"]["norm"], x + fed)


def decoder_layer(
    params: Params, x: ArrayLike, memory: ArrayLike, mask: ArrayLike, memory_mask: ArrayLike
) -> Floats:
    """Apply the decoder layer: LayerNorm(x + Sublayer(x)) for each of three sub-layers."""
    x = floats(x)
    attended = multi_head_attention(params["self_attention"], x, x, mask)
    x = layer_norm(params["after_self_attention"]["norm"], x + attended)
    attended = multi_head_attention(params["cross_attention"], x, memory, memory_mask)
    x = layer_norm(params["after_cross_attention"]["norm"], x + attended)
    fed = feed_forward(params["feed_forward"], x)
    return layer_norm(params["after_feed_forward"]["norm"], x + fed)


def sinusoid(positions: int, d_model: int) -> Floats:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and the cosine at index 2i + 1."""
    table = np.zeros((positions, d_model))
    for pos in range(positions):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            table[pos, 2 * i] = math.sin(angle)
            table[pos, 2 * i + 1] = math.cos(angle)
    return table


def transformer(params: Params, source: ArrayLike, target: ArrayLike) -> Floats:
    """Return the logits for each target token (figure 1). Token 0 is PAD, and token 1 is BOS."""
    return activations(params, source, target)["logits"]


def activations(params: Params, source: ArrayLike, target: ArrayLike) -> dict[str, Floats]:
    """Return the output of each stack, the logits, and the weights of cross-attention by layer."""
    source, target = np.asarray(source), np.asarray(target)
    matrix = floats(params["embedding"]["table"])
    d_model = matrix.shape[1]
    layers = sum(name.startswith("encoder_") for name in params)
    is_token = (source != 0)[:, None, None, :]
    causal = np.tril(np.ones((1, 1, target.shape[1], target.shape[1]), bool))

    def embed(tokens: NDArray[Any]) -> Floats:
        return matrix[tokens] * math.sqrt(d_model) + sinusoid(tokens.shape[1], d_model)

    memory = embed(source)
    for i in range(layers):
        memory = encoder_layer(params[f"encoder_{i}"], memory, is_token)
    decoder_input = np.concatenate([np.ones((len(target), 1), int), target[:, :-1]], axis=1)
    x, cross = embed(decoder_input), list[Floats]()
    for i in range(layers):
        layer = params[f"decoder_{i}"]
        attended = multi_head_attention(layer["self_attention"], x, x, causal)
        query = layer_norm(layer["after_self_attention"]["norm"], x + attended)
        cross.append(multi_head_weights(layer["cross_attention"], query, memory, is_token))
        x = decoder_layer(layer, x, memory, causal, is_token)
    logits = x @ matrix.T
    return {"encoder": memory, "decoder": x, "logits": logits, "cross": floats(cross)}


class BeamSlots:
    """A simulated beam search in which each hypothesis occupies a random beam slot at each step.

    Shapes: B sentences, J hypotheses, L steps.
    """

    def __init__(self, sentences: int, hypotheses: int, steps: int) -> None:
        ordered = np.broadcast_to(np.arange(hypotheses), (sentences, steps, hypotheses))
        self._slots = np.random.default_rng(0).permuted(ordered, axis=2)

    def scatter(self, step: int, x: ArrayLike) -> Array:
        """Reorder values [B, J, ...] by beam slot instead of by hypothesis."""
        values = np.asarray(x)
        scattered = np.empty_like(values)
        scattered[np.arange(len(values))[:, None], self._slots[:, step]] = values
        return jnp.asarray(scattered)

    def gather(self, step: int, x: ArrayLike) -> NDArray[Any]:
        """Undo `scatter`."""
        values = np.asarray(x)
        return values[np.arange(len(values))[:, None], self._slots[:, step]]

    def ancestors(self, step: int) -> Array:
        """Return the slot history of each slot's hypothesis, padded with zeros, [B, J, L]."""
        is_past = np.arange(self._slots.shape[1]) <= step
        return self.scatter(step, np.where(is_past, self._slots.swapaxes(1, 2), 0))


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
