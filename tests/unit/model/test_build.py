"""Test that a model can be built for every option that a config allows."""

import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models import VOCABULARY
from oracles import SMALL_MODEL

from transformer_jax.baselines.build import ARCHITECTURES
from transformer_jax.baselines.recurrent import CELLS
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.validation import PartName, annotations
from transformer_jax.model.build import (
    ACTIVATIONS,
    ATTENTIONS,
    FEED_FORWARDS,
    NORMS,
    POSITIONS,
    RESIDUALS,
    SCORES,
    build_transformer,
)
from transformer_jax.model.encoder_decoder import init_params

TABLES: dict[str, Mapping[str, object]] = {
    "architecture": ARCHITECTURES,
    "rnn_cell": CELLS,
    "positions": POSITIONS,
    "attention_score": SCORES,
    "attention_implementation": ATTENTIONS,
    "layer_norm": RESIDUALS,
    "norm": NORMS,
    "feed_forward": FEED_FORWARDS,
    "activation": ACTIVATIONS,
}


@pytest.mark.parametrize("field", TABLES)
def test_every_name_in_the_config_has_an_entry(field: str) -> None:
    field_type, rules = annotations(ModelConfig)[field]
    names = [name for rule in rules if isinstance(rule, PartName) for name in rule.own]
    names += typing.get_args(field_type)
    # The attention score `none` selects a recurrent model without attention.
    assert set(TABLES[field]) == set(names) - ({"none"} if field == "attention_score" else set())


def test_equal_configs_build_equal_models() -> None:
    """`jax.jit` compiles a function only once for equal static arguments."""
    one, other = (build_transformer(replace(SMALL_MODEL), VOCABULARY, 17) for _ in range(2))
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert one != build_transformer(replace(SMALL_MODEL, layer_norm="pre"), VOCABULARY, 17)


@pytest.mark.parametrize(
    ("implementation", "changes", "message"),
    [
        ("blockwise", {"positions": "alibi"}, "model.positions must be sinusoidal or"),
        ("blockwise", {"attention_score": "additive"}, "model.attention_score must be"),
        ("cudnn", {"positions": "relative"}, "model.positions must be sinusoidal or"),
        ("cudnn", {}, "model.dtype must be bfloat16"),
        ("cudnn", {"attention_dropout": 0.1}, "model.(dtype|attention_dropout) must be"),
        ("cudnn", {"dtype": "bfloat16", "d_k": 16}, "model.d_v must be 16"),
        ("cudnn", {"dtype": "bfloat16", "d_k": 12, "d_v": 12}, "model.d_k must be a multiple of 8"),
    ],
)
def test_an_implementation_rejects_what_it_cannot_compute(
    implementation: Any, changes: dict[str, Any], message: str
) -> None:
    line = rf"^{message}.* with model.attention_implementation {implementation}, got "
    with pytest.raises(ConfigError, match=line):
        replace(SMALL_MODEL, attention_implementation=implementation, **changes)


@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_only_a_transformer_is_built_as_a_transformer(architecture: Any) -> None:
    config = replace(SMALL_MODEL, architecture=architecture)
    with pytest.raises(ConfigError, match=r"^model.architecture must be transformer, got "):
        build_transformer(config, VOCABULARY)


def test_float64_needs_the_64_bit_types_of_jax() -> None:
    config = replace(SMALL_MODEL, dtype="float64")
    with pytest.raises(ConfigError, match=r"float32 or bfloat16 outside `jax.enable_x64"):
        build_transformer(config, 13)
    with jax.enable_x64(True):
        model = build_transformer(config, 13)
        tokens = jnp.ones((1, 3), jnp.int32)
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        params = jax.tree.map(lambda x: x.update(dtype="float64"), params)
        logits = jax.eval_shape(model.apply, {"params": params}, tokens, tokens)
    assert logits.dtype == "float64"
