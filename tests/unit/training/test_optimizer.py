"""Test gradient clipping against Optax. `test_paper` compares the learning rate with Equation 3."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracles import normal

from transformer_jax.training.optimizer import clip_by_known_norm


def test_clipping_by_a_known_norm_equals_clipping_by_global_norm() -> None:
    gradients: Any = {"a": normal(0, 5, 4), "b": [normal(1, 3), jnp.zeros(2)]}
    norm = optax.tree.norm(gradients)
    assert 0.5 < norm < 7
    for max_norm in (0.5, 7.0, 100.0):
        ours, theirs = clip_by_known_norm(max_norm), optax.clip_by_global_norm(max_norm)
        clipped, state = ours.update(gradients, ours.init(gradients), norm=norm)
        expected, expected_state = theirs.update(gradients, theirs.init(gradients))
        assert state == expected_state
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)
