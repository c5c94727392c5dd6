"""Test the environment variables for compiling without the target's devices."""

import os

import pytest

from transformer_jax.compilation.environment import GPU_FLAGS, VARIABLES, configure_environment


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "XLA_FLAGS"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("times", [1, 2])
def test_flags_for_gpus_are_added_once_to_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    for _ in range(times):
        configure_environment(for_gpus=True)
    assert os.environ["XLA_FLAGS"] == f"--xla_cpu_multi_thread_eigen=false {GPU_FLAGS}"


def test_tpus_need_no_flags_but_never_the_devices_of_this_machine() -> None:
    configure_environment(for_gpus=False)
    assert os.environ["XLA_FLAGS"] == ""
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
