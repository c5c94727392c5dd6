"""Test how flags are added to XLA_FLAGS."""

import os

import pytest

from transformer_jax.xla_flags import GPU_FLAGS, add_flags

ALL = [f"--{name}={value}" for name, value in GPU_FLAGS.items()]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ALL),
        ("--xla_cpu_abc=1", ["--xla_cpu_abc=1", *ALL]),
        # The user's value of a flag has precedence.
        (
            "--xla_gpu_deterministic_ops=false",
            ["--xla_gpu_deterministic_ops=false", *ALL[:-1]],
        ),
        # The name of another flag starts with the name of this one.
        (
            "--xla_gpu_deterministic_ops_abc=1",
            ["--xla_gpu_deterministic_ops_abc=1", *ALL],
        ),
    ],
)
def test_missing_flags_are_added_once(
    monkeypatch: pytest.MonkeyPatch, times: int, given: str | None, expected: list[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", given or "")
    if given is None:
        monkeypatch.delenv("XLA_FLAGS")
    for _ in range(times):
        add_flags(GPU_FLAGS)
    assert os.environ["XLA_FLAGS"] == " ".join(expected)
