"""Test training, padding, causality, and parameter rounding for every model variant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from model_variants import FAST, VARIANTS, cases
from models import SOURCE, TARGET, make_model
from oracles import apply

from transformer_jax.model.losses import cross_entropy
from transformer_jax.training.sharding import ROUNDED_PARAMS


@pytest.mark.parametrize("changes", cases(VARIANTS))
def test_training_reaches_every_parameter_and_lowers_the_loss(changes: dict[str, Any]) -> None:
    model, params = make_model(dropout=0.0, **changes)

    def loss(params: dict[str, Any]) -> Array:
        logits: Any = model.apply({"params": params}, SOURCE, TARGET, train=True)
        total = cross_entropy(logits, TARGET, 0.0)
        return total.nll / total.count

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    first, gradient = loss_and_gradient(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.any(leaf), jax.tree_util.keystr(path)
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
    last = first
    for _ in range(21):
        last, gradient = loss_and_gradient(params)
        params = jax.tree.map(lambda x, g: x - 0.02 * g, params, gradient)
    assert float(last) < 0.9 * float(first)


@pytest.mark.parametrize("changes", cases([{}, *VARIANTS], [{}, *FAST, VARIANTS[12]]))
def test_every_module_rounds_the_parameters_that_fsdp_sends_rounded(
    changes: dict[str, Any],
) -> None:
    model, params = make_model(dtype="bfloat16", **changes)

    def round_if_sent_rounded(path: tuple[Any, ...], param: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return param.astype(jnp.bfloat16).astype(param.dtype) if name in ROUNDED_PARAMS else param

    rounded = jax.tree.map_with_path(round_if_sent_rounded, params)

    def loss(params: Any) -> Array:
        logits: Any = model.apply({"params": params}, SOURCE, TARGET)
        return cross_entropy(logits, TARGET, 0.1).smoothed

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    expected, found = loss_and_gradient(params), loss_and_gradient(rounded)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("changes", cases(VARIANTS))
def test_padding_and_later_tokens_do_not_change_a_prediction(changes: dict[str, Any]) -> None:
    model, params = make_model(**changes)
    before = apply(model, params, SOURCE, TARGET)
    padded = jnp.pad(SOURCE, ((0, 0), (0, 3)))
    after = apply(model, params, padded, TARGET.at[:, 3:].set(6))
    np.testing.assert_allclose(after[:, :4], before[:, :4], atol=1e-5)
    assert not np.allclose(after[:, 4], before[:, 4], atol=0.01)
