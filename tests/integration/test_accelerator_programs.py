"""Compile training steps for a TPU and a GPU that do not exist, and test how they compute.

The tests need libtpu (`pip install --group tpu-compile`) or JAX's CUDA plugin
(`pip install '.[cuda]'`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from test_compile import run_python

from transformer_jax.compilation.targets import parse_target
from transformer_jax.compilation.topologies import check_installed
from transformer_jax.errors import UsageError

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def compile_steps(target: str, *cases: str) -> dict[str, Any]:
    """Return what `compiled_programs` prints, or skip the test if the compiler is missing."""
    try:
        check_installed(parse_target(target))
    except UsageError as error:
        pytest.skip(str(error))
    done = run_python(TESTS.parent, str(TESTS / "compiled_programs.py"), target, *cases)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def gpu_step() -> dict[str, Any]:
    return compile_steps("h100", "data:16")["data:16"]


@pytest.fixture(scope="module")
def tpu_step() -> dict[str, Any]:
    return compile_steps("v5e", "data:16")["data:16"]


def test_a_gpu_copies_no_state(gpu_step: dict[str, Any]) -> None:
    assert "conditional" not in gpu_step["operations"]
    # The state has 1.7 MiB; a few scalars may be copied.
    assert gpu_step["copied_bytes"] < 1 << 16


def test_a_gpu_multiplies_only_bfloat16_arrays(gpu_step: dict[str, Any]) -> None:
    assert set(gpu_step["products"]) == {"bf16 x bf16"}


def test_a_gpu_scatters_only_into_the_embedding(gpu_step: dict[str, Any]) -> None:
    assert gpu_step["operations"].get("scatter", 0) <= 2


def test_a_tpu_updates_the_state_without_a_branch(tpu_step: dict[str, Any]) -> None:
    assert "conditional" not in tpu_step["operations"]
