"""Test the structure that all models share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import SOURCE, TARGET, make_model
from oracles import apply

from transformer_jax.model.encoder_decoder import init_params, make_rng, shift_right
from transformer_jax.special_tokens import BOS


def test_the_decoder_reads_a_start_token_and_all_tokens_except_the_last() -> None:
    target = jnp.asarray([[5, 6, 2], [7, 2, 0]])
    np.testing.assert_array_equal(shift_right(target), [[BOS, 5, 6], [BOS, 7, 2]])
    np.testing.assert_array_equal(shift_right(target, 9)[:, 0], [9, 9])


@pytest.mark.parametrize("architecture", ["transformer", "rnn", "conv"])
def test_a_logit_depends_only_on_the_source_and_the_earlier_target_tokens(
    architecture: str,
) -> None:
    score = {} if architecture == "transformer" else {"attention_score": "dot_product"}
    model, params = make_model(architecture=architecture, **score)
    changed = TARGET.at[:, 2].set(9)
    before, after = (apply(model, params, SOURCE, target) for target in (TARGET, changed))
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert abs(before[0, 3:] - after[0, 3:]).max() > 1e-3


def test_parameters_do_not_depend_on_the_default_generator_of_jax() -> None:
    model, _ = make_model()
    expected = init_params(model, make_rng(3))
    with jax.default_prng_impl("rbg"):
        params = init_params(model, make_rng(3))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
