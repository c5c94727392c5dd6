"""Test which platform a program is traced for."""

import contextlib

import jax
import pytest

from transformer_jax.model.target_platform import target_platform, tracing_for


@pytest.mark.parametrize(
    ("name", "platform"), [("cpu", "cpu"), ("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu")]
)
def test_the_context_determines_the_platform(name: str, platform: str) -> None:
    with tracing_for(name):
        assert target_platform() == platform


def test_the_innermost_context_wins_and_an_error_restores_the_outer_one() -> None:
    with tracing_for("tpu"):
        with contextlib.suppress(LookupError), tracing_for("cuda"):
            assert target_platform() == "gpu"
            raise LookupError
        assert target_platform() == "tpu"


def test_the_default_is_the_platform_of_jax() -> None:
    expected = jax.default_backend() if jax.default_backend() in ("cpu", "tpu") else "gpu"
    assert target_platform() == expected
