"""Draw figures 1 and 2 of the paper, partly from traced programs.

The sub-layers in figure 1 and the operations of scaled dot-product attention in figure 2 are read
from JAX traces of the model, so a model with different sub-layers produces different boxes. Flax
names each operation after the modules that contain it, so a traced model lists its sub-layers in
the order in which they run. The embeddings, the linear layer, and the softmax in figure 1 are
hard-coded, and so is multi-head attention in figure 2.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from experiments.paper.diagrams import Column, draw_columns
from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import masked_softmax, scaled_dot_product, weighted_sum
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import Params
from transformer_jax.model.inspect import abstract_params
from transformer_jax.visualization.style import Picture

SUB_LAYERS = {
    "self_attention": "Multi-Head Attention",
    "cross_attention": "Multi-Head Attention",
    "feed_forward": "Feed Forward",
    "after_self_attention": "Add & Norm",
    "after_cross_attention": "Add & Norm",
    "after_feed_forward": "Add & Norm",
}
"""The paper's names for the modules in a layer."""

OPERATIONS = {"dot_general": "MatMul", "mul": "Scale", "select_n": "Mask", "exp": "SoftMax"}
"""The paper's name for each part of attention, keyed by the JAX primitive that identifies it."""

VOCABULARY = 100


def draw_figure_1() -> Picture:
    """Draw the architecture of the paper's model."""
    return draw_columns(describe_architecture(ModelConfig()))


def describe_architecture(config: ModelConfig) -> list[Column]:
    """Return the encoder and the decoder as columns of boxes."""
    model = build_transformer(config, VOCABULARY)
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)

    def apply(params: Params, source: Array, target: Array) -> object:
        return model.apply({"params": params}, source, target)

    closed = jax.make_jaxpr(apply)(abstract_params(model), tokens, tokens)
    paths = list(_module_paths(closed.jaxpr))
    encoder, decoder = (_sub_layers(paths, f"{stack}_0") for stack in ("encoder", "decoder"))
    first = ["Embedding", "+ Positional Encoding"]
    times, decoder_times = (f"{count} x" for count in config.layers_per_stack)
    encoder_labels, decoder_labels = (
        [SUB_LAYERS.get(name, name) for name in names] for names in (encoder, decoder)
    )
    decoder_labels[decoder.index("self_attention")] = "Masked Multi-Head Attention"
    return [
        Column("Inputs", [*first, *encoder_labels], "", range(2, 2 + len(encoder)), times),
        Column(
            "Outputs (shifted right)",
            [*first, *decoder_labels, "Linear", "Softmax"],
            "Output Probabilities",
            range(2, 2 + len(decoder)),
            decoder_times,
            reads=2 + decoder.index("cross_attention"),
        ),
    ]


def draw_figure_2() -> Picture:
    """Draw multi-head attention, and scaled dot-product attention as the program computes it."""
    multi_head = ["Linear (V, K, Q)", "Scaled Dot-Product Attention", "Concat", "Linear"]
    return draw_columns(
        [
            Column("Q, K, V", describe_attention()),
            Column("V, K, Q", multi_head, "", range(1, 2), f"{ModelConfig().num_heads} x"),
        ]
    )


def describe_attention() -> list[str]:
    """Return the operations of equation 1, in the order in which the program runs them."""
    array = jax.ShapeDtypeStruct((1, 3, 2, 4), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 3, 3), jnp.bool_)

    def attend(query: Array, key: Array, value: Array, mask: Array) -> Array:
        return weighted_sum(masked_softmax(scaled_dot_product(query, key), mask), value)

    closed = jax.make_jaxpr(attend)(array, array, array, mask)
    names = (equation.primitive.name for equation in _equations(closed.jaxpr))
    return [OPERATIONS[name] for name in names if name in OPERATIONS]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield a jaxpr's equations in order, replacing each function call with the equations in it."""
    for equation in jaxpr.eqns:
        nested = [equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params]
        if nested:
            yield from _equations(getattr(nested[0], "jaxpr", nested[0]))
        else:
            yield equation


def _module_paths(jaxpr: Jaxpr) -> Iterator[list[str]]:
    """For each equation in a jaxpr, yield the names of its enclosing modules, outermost first."""
    for equation in jaxpr.eqns:
        stack = str(equation.source_info.name_stack)
        # In a name such as "embedding.logits", the part after the dot is a method.
        yield [name.split(".")[0] for name in stack.split("/")]


def _sub_layers(paths: list[list[str]], layer: str) -> list[str]:
    """Return the names of a layer's modules, in the order in which they run."""
    # A module that calls its own method appears more than once in a path.
    names = (path[len(path) - path[::-1].index(layer) :] for path in paths if layer in path)
    return list(dict.fromkeys(name[0] for name in names if name))
