"""Test the environment variables for compiling without the target's devices."""

import os

import pytest

from transformer_jax.compilation.environment import VARIABLES, configure_environment
from transformer_jax.xla_flags import GPU_FLAGS


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "XLA_FLAGS"):
        monkeypatch.setenv(name, "")


def test_programs_for_gpus_have_the_flags_of_runs_without_timing_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_abc=1")
    configure_environment(for_gpus=True)
    flags = {"xla_cpu_abc": "1", "xla_gpu_autotune_level": "0", **GPU_FLAGS}
    assert os.environ["XLA_FLAGS"] == " ".join(f"--{k}={v}" for k, v in flags.items())


def test_tpus_need_no_flags_but_never_the_devices_of_this_machine() -> None:
    configure_environment(for_gpus=False)
    assert os.environ["XLA_FLAGS"] == ""
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
