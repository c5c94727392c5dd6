"""Compile training steps for a TPU and a GPU that are not present, and test the compiled programs.

The TPU tests need libtpu (`pip install --group tpu-compile`), and the GPU tests need JAX's CUDA
plugin (`pip install 'jax[cuda13]'`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_clean_python

from transformer_jax.compilation.targets import parse_target
from transformer_jax.compilation.topologies import check_installed
from transformer_jax.errors import UsageError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive


def compile_steps(target: str, *cases: str) -> dict[str, Any]:
    """Return the output of `compiled_programs`, or skip the test if the compiler is missing."""
    try:
        check_installed(parse_target(target))
    except UsageError as error:
        pytest.skip(str(error))
    done = run_clean_python(ROOT, "-m", "tests.support.compiled_programs", target, *cases)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def gpu_step() -> dict[str, Any]:
    return compile_steps("h100", "data:16")["data:16"]


@pytest.fixture(scope="module")
def tpu_step() -> dict[str, Any]:
    return compile_steps("v5e", "data:16")["data:16"]


@pytest.fixture(scope="module")
def slice_steps() -> dict[str, Any]:
    return compile_steps("v5e:2x4", "data:128", "fsdp:128", "fsdp:256")


def test_a_gpu_copies_no_state(gpu_step: dict[str, Any]) -> None:
    assert "conditional" not in gpu_step["operations"]
    # The training state takes up 1.7 MiB. Copies of a few scalars are acceptable.
    assert gpu_step["copied_bytes"] < 1 << 16


def test_a_gpu_multiplies_only_bfloat16_arrays(gpu_step: dict[str, Any]) -> None:
    assert set(gpu_step["products"]) == {"bf16 x bf16"}


def test_a_gpu_scatters_only_into_the_embedding(gpu_step: dict[str, Any]) -> None:
    assert gpu_step["operations"].get("scatter", 0) <= 2


def test_a_tpu_updates_the_state_without_a_branch(tpu_step: dict[str, Any]) -> None:
    assert "conditional" not in tpu_step["operations"]


def test_a_tpu_copies_no_arrays_to_flatten_them(tpu_step: dict[str, Any]) -> None:
    # The compiled step contains 17 copy operations. An earlier version, which flattened the inputs
    # of matrix products, contained 106 copy operations.
    assert tpu_step["operations"]["copy"] < 40


def test_data_parallelism_adds_each_gradient_once_in_float32(slice_steps: dict[str, Any]) -> None:
    step = slice_steps["data:128"]
    # The all-reduce also sums three loss scalars over the devices: smoothed, nll, and count.
    size = 4 * (step["num_params"] + 3)
    assert step["collectives"] == [
        {"kind": "all-reduce", "dtype": "f32", "count": 1, "bytes": size}
    ]


def test_collectives_of_fsdp_do_not_grow_with_the_batch(slice_steps: dict[str, Any]) -> None:
    small, large = slice_steps["fsdp:128"], slice_steps["fsdp:256"]
    assert small["collectives"] == large["collectives"]
    kinds = {collective["kind"] for collective in small["collectives"]}
    assert (
        {"all-gather", "reduce-scatter"} <= kinds <= {"all-gather", "reduce-scatter", "all-reduce"}
    )
