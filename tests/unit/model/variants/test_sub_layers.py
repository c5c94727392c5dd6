"""Test norms and feed-forward networks, including custom ones, against their formulas."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jaxtyping import Array
from models import SOURCE, TARGET, VOCABULARY, make_model
from oracles import (
    SMALL_MODEL,
    Floats,
    apply,
    drawn_params,
    floats,
    initial_params,
    normal,
    sigmoid,
)

import transformer_jax as tj
from transformer_jax.model.build import choose_components

WIDTH, WIDE = SMALL_MODEL.d_model, SMALL_MODEL.d_ff


def component(name: str, **changes: Any) -> Any:
    """Return a component of the model with the given changes to its config."""
    config = replace(SMALL_MODEL, **changes)
    return getattr(choose_components(config), name)(config)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = 3 + 5 * normal(0, 2, 5, WIDTH)
    norm = component("norm", norm="rms_norm", layer_norm_epsilon=0.5)
    params = drawn_params(norm, x)
    assert set(params) == {"scale"}
    expected = np.zeros(x.shape)
    for index in np.ndindex(2, 5):
        vector = floats(x[index])
        root = math.sqrt(sum(vector**2) / WIDTH + 0.5)
        expected[index] = vector / root * floats(params["scale"])
    np.testing.assert_allclose(apply(norm, params, x), expected, atol=1e-5)


def test_a_stack_that_normalizes_first_uses_the_chosen_norm_everywhere() -> None:
    _, params = make_model(layer_norm="pre", norm="rms_norm")
    norms = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
        if "norm" in jax.tree_util.keystr(path)
    }
    layers = ("encoder_0", ("self_attention", "feed_forward"))
    layers = *layers, "decoder_0", ("self_attention", "cross_attention", "feed_forward")
    expected = {
        f"{stack}.after_{name}.norm.scale"
        for stack, names in zip(layers[::2], layers[1::2], strict=True)
        for name in names
    }
    assert norms == expected | {"encoder_norm.scale", "decoder_norm.scale"}


def gelu(x: Floats) -> Floats:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_a_gated_network_multiplies_the_activation_by_a_linear_layer(name: str, bias: bool) -> None:
    x = normal(0, 2, 5, WIDTH)
    network = component("feed_forward", feed_forward=name, feed_forward_bias=bias)
    params = drawn_params(network, x)
    shapes = {"gate": (WIDTH, WIDE), "inner": (WIDTH, WIDE), "outer": (WIDE, WIDTH)}
    assert {key: dense["kernel"].shape for key, dense in params.items()} == shapes

    def dense(x: Floats, key: str) -> Floats:
        assert ("bias" in params[key]) == bias
        shift = floats(params[key]["bias"]) if bias else 0.0
        return x @ floats(params[key]["kernel"]) + shift

    gate, inner = dense(floats(x), "gate"), dense(floats(x), "inner")
    activated = {"swiglu": gate * sigmoid(gate), "geglu": gelu(gate)}[name]
    expected = dense(activated * inner, "outer")
    np.testing.assert_allclose(apply(network, params, x), expected, atol=1e-4)


def test_without_biases_the_feed_forward_network_has_only_matrices() -> None:
    x = normal(0, 2, 5, WIDTH)
    network = component("feed_forward", feed_forward_bias=False)
    params = drawn_params(network, x)
    assert {key: set(dense) for key, dense in params.items()} == {
        "inner": {"kernel"},
        "outer": {"kernel"},
    }
    hidden = np.maximum(floats(x) @ floats(params["inner"]["kernel"]), 0)
    expected = hidden @ floats(params["outer"]["kernel"])
    np.testing.assert_allclose(apply(network, params, x), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "swiglu"])
def test_activation_dropout_acts_on_the_input_of_the_last_layer(name: str) -> None:
    x = normal(0, 2, 5, WIDTH)
    changes: dict[str, Any] = {"feed_forward": name, "d_ff": WIDTH, "feed_forward_bias": False}
    network = component("feed_forward", activation_dropout=0.5, **changes)
    params = drawn_params(network, x) | {"outer": {"kernel": jnp.eye(WIDTH)}}
    kept = apply(network, params, x)
    dropped = apply(network, params, x, train=True, rng=jax.random.key(1))
    is_zero = np.isclose(dropped, 0)
    assert 0.3 < np.mean(np.asarray(is_zero)[~np.isclose(kept, 0)]) < 0.7
    np.testing.assert_allclose(np.where(is_zero, 0, 2 * kept), dropped, atol=1e-5)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_a_gated_network_rejects_another_activation(name: str) -> None:
    rule = f"relu, the default, with model.feed_forward {name} .it has its own., got 'swish'"
    with pytest.raises(tj.ConfigError, match=f"^model.activation must be {rule}"):
        replace(SMALL_MODEL, feed_forward=name, activation="swish")


class ScaleNorm(nn.Module):
    """A norm that scales all vectors to one learned length (Nguyen and Salazar 2019)."""

    config: tj.ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        length = self.param("length", nn.initializers.constant(self.config.d_model**0.5), ())
        return length * x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class DroppedIdentity(nn.Module):
    """A sub-layer that only applies dropout."""

    config: tj.ModelConfig

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Array:
        return nn.Dropout(0.5)(x, deterministic=not train)


@pytest.mark.usefixtures("forget_parts")
@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_parts_of_a_user_replace_all_norms_and_feed_forward_networks(layer_norm: Any) -> None:
    tj.register("model.norm", "scale_norm")(ScaleNorm)
    tj.register("model.feed_forward", "dropped_identity")(DroppedIdentity)
    changes = {"norm": "scale_norm", "feed_forward": "dropped_identity", "num_layers": 1}
    config = replace(SMALL_MODEL, layer_norm=layer_norm, **changes)
    model, other = (tj.build_transformer(config, VOCABULARY) for _ in range(2))
    assert model == other
    params = initial_params(model, SOURCE, TARGET)
    assert "feed_forward" not in params["encoder_0"]
    norms = [x for path, x in jax.tree_util.tree_leaves_with_path(params) if "norm" in str(path)]
    assert [float(x) for x in norms] == [4.0] * (5 if layer_norm == "post" else 7)
    assert np.all(np.isfinite(apply(model, params, SOURCE, TARGET)))
    rng = jax.random.key(1)
    assert np.all(np.isfinite(apply(model, params, SOURCE, TARGET, train=True, rng=rng)))
