"""Clipping beside Optax's; the schedule is tested against the paper in test_paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import normal

from transformer_jax.training.optimizer import clip_by_known_norm


@pytest.mark.parametrize("longest", [0.5, 7.0, 100.0])
def test_clipping_by_a_known_norm_is_that_by_the_norm(longest: float) -> None:
    gradients: Any = {"a": normal(0, 5, 4), "b": [normal(1, 3), jnp.zeros(2)]}
    known, optaxs = clip_by_known_norm(longest), optax.clip_by_global_norm(longest)
    norm = optax.tree.norm(gradients)
    assert 0.5 < norm < 7
    clipped, state = known.update(gradients, known.init(gradients), norm=norm)
    expected, its_state = optaxs.update(gradients, optaxs.init(gradients))
    assert state == its_state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)
