"""Test that a missing compiler causes an error that names the command to install it."""

import importlib.util

import pytest

from transformer_jax.compilation.targets import parse_target
from transformer_jax.compilation.topologies import make_devices
from transformer_jax.errors import UsageError


@pytest.mark.parametrize(
    ("target", "message"),
    [("v5e:2x4", r"compiling for TPUs needs libtpu"), ("h100:8", "needs JAX's CUDA plugin")],
)
def test_a_missing_compiler_is_named(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"{message}.*pip install"):
        make_devices(parse_target(target))
