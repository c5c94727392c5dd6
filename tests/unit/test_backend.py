"""Test the preparation of JAX's backends and the count of compiled programs."""

import jax
import numpy as np

from transformer_jax.backend import Compilations, count_compilations, host_device


def test_the_host_device_is_a_cpu() -> None:
    assert host_device().platform == "cpu"


def test_each_compilation_is_counted_once_with_its_name() -> None:
    @jax.jit
    def negate(x: jax.Array) -> jax.Array:
        return -x

    with count_compilations() as found:
        for _ in range(2):
            negate(np.ones(3, np.float32))
        negate(np.ones(5, np.float32))
    negate(np.ones(7, np.float32))
    assert found.names == ["jit(negate)"] * 2
    assert found.seconds > 0


def test_the_summary_mentions_programs_from_the_cache() -> None:
    compilations = Compilations(["a", "b"], seconds=1.25)
    assert str(compilations) == "compilation: 2 programs in 1.2 s"
    compilations.cached = 1
    assert str(compilations) == "compilation: 2 programs in 1.2 s, 1 of them loaded from the cache"
