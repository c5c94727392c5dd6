"""Lower functions for platforms that this machine does not have."""

from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.model.target_platform import tracing_for


def lower_for(platform: str, function: Callable[..., Any], *arguments: Any) -> str:
    """Return the StableHLO text of a function for "cpu", "cuda", or "tpu"."""
    # Wrap the function, because JAX caches traces by function but the trace depends on the
    # platform.
    traced_function = jax.jit(lambda *arguments: function(*arguments))
    with tracing_for(platform):
        traced = traced_function.trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()
