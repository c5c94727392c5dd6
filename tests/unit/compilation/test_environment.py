"""Test the environment variables for compiling without the target's devices."""

import os

import pytest

from transformer_jax.compilation.environment import FLAGS, VARIABLES, configure_environment


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "XLA_FLAGS"):
        monkeypatch.setenv(name, "")


ALL_GPU_FLAGS = [f"--{name}={value}" for name, value in FLAGS.items()]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ALL_GPU_FLAGS),
        ("--xla_cpu_abc=1", ["--xla_cpu_abc=1", *ALL_GPU_FLAGS]),
        # The user's value of a flag has precedence, as in a run.
        (
            "--xla_gpu_deterministic_ops=false",
            ["--xla_gpu_deterministic_ops=false", *ALL_GPU_FLAGS[:-1]],
        ),
    ],
)
def test_missing_flags_for_gpus_are_added_once(
    monkeypatch: pytest.MonkeyPatch, times: int, given: str, expected: list[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(times):
        configure_environment(for_gpus=True)
    assert os.environ["XLA_FLAGS"] == " ".join(expected)


def test_tpus_need_no_flags_but_never_the_devices_of_this_machine() -> None:
    configure_environment(for_gpus=False)
    assert os.environ["XLA_FLAGS"] == ""
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
