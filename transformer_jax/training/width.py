"""Scale learning rates and initial values so that tuned settings transfer across widths.

This is the maximal update parametrization (muP) for Adam (Yang et al. 2022, Table 8), which
`train.base_width` selects. Differs from the paper. Table 8 divides the learning rate of matrices by
the width, multiplies logits by 1 / width, and divides attention scores by d_k instead of its square
root. This package multiplies neither logits nor scores by a constant, so that the model computes
the same function as the paper's. Instead, it multiplies the initial value and the learning rate of
a parameter that already scales the logits or the scores, which has the same effect with Adam.
"""

from typing import Any, NamedTuple

import jax
import optax

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.model.encoder_decoder import Params

GROUPS = {
    "kernel": "matrix",
    "table": "embedding",
    "positions": "positions",
    **dict.fromkeys(("bias", "scale", "output_bias"), "vector"),
}
"""The group of a parameter, keyed by the last part of its name, with the exceptions below."""


class Factors(NamedTuple):
    """Multipliers for a group of parameters, relative to the paper's model of the base width."""

    initial: float = 1.0
    """Multiplier for the initial values, which already depend on the width as in the paper."""
    rate: float = 1.0
    """Multiplier for the learning rate."""


def width_factors(config: TrainConfig, model: ModelConfig) -> dict[str, Factors]:
    """Return the factors of each group of parameters, or {} if they are all 1.

    The paper's embeddings are drawn from N(0, 1 / d_model) and multiplied by sqrt(d_model), so
    their learning rate must be proportional to 1 / sqrt(d_model). In the paper's schedule, the rate
    of all parameters is proportional to 1 / sqrt(d_model).
    """
    if config.base_width is None:
        return {}
    ratio = model.d_model / config.base_width
    base_d_k = config.base_d_k or model.d_k / ratio
    scores, logits = (base_d_k / model.d_k) ** 0.5, ratio**-0.5
    has_small_positions = model.learned_positions_init == "normal"
    factors = {
        "vector": Factors(),
        "matrix": Factors(rate=1 / ratio),
        "query_matrix": Factors(scores, scores / ratio),
        "query_vector": Factors(scores, scores),
        # Both the embeddings and the last normalization scale the logits.
        "embedding": Factors(rate=logits),
        "last_norm": Factors(logits, logits),
        "positions": Factors(initial=1 / logits if has_small_positions else 1.0),
    }
    return factors if set(factors.values()) != {Factors()} else {}


def parameter_groups(model: ModelConfig, params: optax.Params) -> Any:  # noqa: ANN401 - a tree
    """Return the name of each parameter's group."""
    last = f"decoder_{model.layers_per_stack[1] - 1}/after_feed_forward/"
    last_norm = last if model.layer_norm == "post" else "decoder_norm/"
    scores = "query_norm" if model.query_key_norm else "query"

    def group(path: tuple[Any, ...], _leaf: jax.Array) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        *modules, kind = name.split("/")
        if name.startswith(last_norm):
            return "last_norm"
        return f"query_{GROUPS[kind]}" if modules[-1:] == [scores] else GROUPS[kind]

    return jax.tree.map_with_path(group, params)


def scale_initial(config: TrainConfig, model: ModelConfig, params: Params) -> Params:
    """Return the initial parameters, given those of the paper's model."""
    if not (factors := width_factors(config, model)):
        return params
    groups = parameter_groups(model, params)
    return jax.tree.map(lambda group, x: factors[group].initial * x, groups, params)
