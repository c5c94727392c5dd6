"""Test that decoding with a carry of fixed size follows each hypothesis through its beam slots."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from models import SOURCE, make_model
from oracles import BeamSlots, apply

from transformer_jax.model.encoder_decoder import shift_right
from transformer_jax.model.inspect import attention_weights

HYPOTHESES, STEPS = 3, 4
TARGETS = np.random.default_rng(0).integers(4, 13, (len(SOURCE), HYPOTHESES, STEPS))


@pytest.mark.parametrize("architecture", ["rnn", "conv"])
def test_cached_logits_are_those_of_the_whole_forward_pass(architecture: str) -> None:
    model, params = make_model(architecture=architecture, attention_score="dot_product")
    expected = np.stack(
        [apply(model, params, SOURCE, jnp.asarray(TARGETS[:, j])) for j in range(HYPOTHESES)], 1
    )
    slots = BeamSlots(len(SOURCE), HYPOTHESES, STEPS)
    bound: Any = model.bind({"params": params})
    state = bound.init_decoding(SOURCE, num_hypotheses=HYPOTHESES, max_length=STEPS)
    inputs = np.stack([shift_right(jnp.asarray(TARGETS[:, j])) for j in range(HYPOTHESES)], 1)
    for step in range(STEPS):
        tokens = slots.scatter(step, inputs[:, :, step])
        # The search knows only the slots of the earlier tokens.
        ancestors = slots.ancestors(step).at[:, :, step:].set(0)
        logits, state = bound.decode_step(tokens, jnp.int32(step), ancestors, state)
        actual = slots.gather(step, logits)
        np.testing.assert_allclose(actual, expected[:, :, step], atol=5e-5)


def test_a_model_without_attention_has_no_attention_weights() -> None:
    model, params = make_model(architecture="rnn", attention_score="none")
    assert attention_weights(model, params, SOURCE, SOURCE) == {}
