"""Test that masking a head removes its contribution and changes nothing else."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import SOURCE, TARGET, make_model
from oracles import apply

from transformer_jax.analysis.head_importance import KINDS, MODULES, mask_heads
from transformer_jax.errors import UsageError
from transformer_jax.model.attention import Heads, MultiHeadAttention
from transformer_jax.visualization.attention_views import Kind

NUM_LAYERS, NUM_HEADS = 2, 3
SHAPE = (len(KINDS), NUM_LAYERS, NUM_HEADS)
MODEL, PARAMS = make_model(num_layers=NUM_LAYERS, num_heads=NUM_HEADS)


class SilencedAttention(MultiHeadAttention):
    """Multi-head attention with three heads, in which the output of the second head is zero."""

    def attend_heads(self, heads: Heads, train: bool, /) -> jax.Array:
        outputs = super().attend_heads(heads, train)
        return outputs * jnp.asarray([1.0, 0.0, 1.0])[None, None, :, None]


def test_the_kinds_of_the_mask_are_those_of_attention_pictures() -> None:
    assert get_args(Kind) == KINDS


def test_a_mask_of_all_heads_changes_no_bit() -> None:
    masked = mask_heads(PARAMS, np.ones(SHAPE, bool))
    jax.tree.map(np.testing.assert_array_equal, masked, PARAMS)


@pytest.mark.parametrize("kind", KINDS)
def test_masking_equals_setting_the_output_of_a_head_to_zero(kind: str) -> None:
    mask = np.ones(SHAPE, bool)
    mask[KINDS.index(kind), :, 1] = False
    stack, module = MODULES[kind]
    params = mask_heads(PARAMS, mask)[f"{stack}_0"][module]
    config = MODEL.config
    attention = MultiHeadAttention(config, MODEL.components.make_score)
    silenced = SilencedAttention(config, MODEL.components.make_score)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, config.d_model), np.float32))
    allowed = jnp.ones((1, 1, 4, 4), bool)
    original = PARAMS[f"{stack}_0"][module]
    expected = apply(silenced, original, x, x, allowed)
    np.testing.assert_array_equal(apply(attention, params, x, x, allowed), expected)
    assert not np.allclose(apply(attention, original, x, x, allowed), expected, atol=1e-3)


def test_the_output_is_the_sum_over_the_other_heads() -> None:
    heads = np.random.default_rng(1).standard_normal((NUM_HEADS, MODEL.config.d_v))
    mask = np.ones(SHAPE, bool)
    mask[2, 1, 0] = False
    kernel = PARAMS["decoder_1"]["cross_attention"]["output"]["kernel"]
    masked = mask_heads(PARAMS, mask)["decoder_1"]["cross_attention"]["output"]["kernel"]
    expected = sum(heads[i] @ np.asarray(kernel[i]) for i in range(1, NUM_HEADS))
    np.testing.assert_allclose(np.einsum("hv,hvd->d", heads, masked), expected, rtol=1e-5)


def test_each_entry_of_the_mask_changes_the_kernel_of_one_module() -> None:
    changed: set[str] = set()
    for index in np.ndindex(*SHAPE):
        mask = np.ones(SHAPE, bool)
        mask[index] = False
        leaves = jax.tree_util.tree_leaves_with_path(mask_heads(PARAMS, mask))
        originals = jax.tree.leaves(PARAMS)
        names = [
            jax.tree_util.keystr(path)
            for (path, leaf), original in zip(leaves, originals, strict=True)
            if not np.array_equal(leaf, original)
        ]
        assert len(names) == 1
        changed.add(f"{names[0]} {index[2]}")
    assert len(changed) == mask.size


def test_a_mask_can_be_an_argument_of_a_compiled_function() -> None:
    @jax.jit
    def logits(params: dict[str, Any], mask: jax.Array) -> jax.Array:
        return jnp.asarray(MODEL.apply({"params": mask_heads(params, mask)}, SOURCE, TARGET))

    whole = logits(PARAMS, jnp.ones(SHAPE, bool))
    np.testing.assert_array_equal(whole, apply(MODEL, PARAMS, SOURCE, TARGET))
    assert not np.allclose(whole, logits(PARAMS, jnp.zeros(SHAPE, bool)), atol=1e-3)


def test_a_mask_of_another_shape_is_an_error() -> None:
    wrong = np.ones((3, NUM_LAYERS, NUM_HEADS + 1), bool)
    with pytest.raises(UsageError, match=r"must have the shape \(3, 2, 3\), got \(3, 2, 4\)$"):
        mask_heads(PARAMS, wrong)
    with pytest.raises(UsageError, match="got"):
        mask_heads(make_model(num_layers=1)[1], np.ones(SHAPE, bool))


def test_stacks_of_different_depths_are_an_error() -> None:
    _, params = make_model(num_layers=2, num_decoder_layers=1, num_heads=NUM_HEADS)
    with pytest.raises(UsageError, match=r"but this model has 2 and 1$"):
        mask_heads(params, np.ones(SHAPE, bool))
