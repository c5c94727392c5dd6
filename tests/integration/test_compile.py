"""Compile training steps for TPUs that are not present, and test the compiled programs.

The tests need libtpu: `pip install --group tpu-compile`.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_clean_python

from transformer_jax.compilation.targets import GIB, TPUS, parse_target

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install --group tpu-compile",
    ),
]
PARALLELISM = ("data", "fsdp", "pmap")
# The demo model, and the base model with fewer layers and a smaller vocabulary.
CONFIGS: dict[str, list[str]] = {
    "tiny": [],
    "base": ["--model.num-layers", "2", "--data.vocab-size", "8000"],
}


# A program that prints how many devices and hosts libtpu reports for each target.
COUNT = """
import json, sys
from transformer_jax.compilation.environment import configure_environment
configure_environment(for_gpus=False)
from transformer_jax.compilation.targets import parse_target
from transformer_jax.compilation.topologies import make_devices
devices = [make_devices(parse_target(target)) for target in sys.argv[1:]]
print(json.dumps([[len(x), len({device.process_index for device in x})] for x in devices]))
"""


def compile_config(name: str, target: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run `compile` in bfloat16 for the largest batch shape, and return its results."""
    options = ("--model.dtype", "bfloat16", "--largest", "--json", *options)
    command = ("-m", "transformer_jax", "compile", name, "--target", target, *options)
    done = run_clean_python(folder, *command)
    assert done.returncode in (0, 71), done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["v5e:2x2", "v5e:4x4"])
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=CONFIGS)
def answers(
    request: pytest.FixtureRequest, target: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The results for a config and a target, keyed by the kind of parallelism."""
    options = (*CONFIGS[request.param], "--parallelism", *PARALLELISM)
    folder = tmp_path_factory.mktemp("compile")
    answers = compile_config(request.param, target, folder, *options)
    return dict(zip(PARALLELISM, answers, strict=True))


def collectives(answer: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    [program] = answer["programs"]
    return {(c["kind"], c["dtype"]): c for c in program["collectives"]}


def test_libtpu_has_as_many_devices_and_hosts_as_each_target(tmp_path: Path) -> None:
    targets = [*TPUS, "v4:2x2x4", "v5e:2x4", "v5e:4x4", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1"]
    done = run_clean_python(tmp_path, "-c", COUNT, *targets)
    expected = [[t.num_devices, t.num_hosts] for t in map(parse_target, targets)]
    assert json.loads(done.stdout) == expected, done.stderr


def test_the_steps_fit_and_only_fsdp_splits_the_state(
    answers: dict[str, dict[str, Any]], target: str
) -> None:
    programs = {name: answer["programs"][0] for name, answer in answers.items()}
    for answer, program in zip(answers.values(), programs.values(), strict=True):
        assert answer["fits"]
        assert answer["hosts"] == (1 if target == "v5e:2x2" else 4)
        assert program["state_bytes"] < program["peak_bytes"] < 15.75 * GIB
    # The compiler's FLOP count includes operations that are not matrix products.
    assert programs["data"]["program_flops"] > programs["data"]["model_flops"]
    assert programs["data"]["state_bytes"] == programs["pmap"]["state_bytes"]
    num_devices = answers["data"]["devices"]
    share = programs["fsdp"]["state_bytes"] / programs["data"]["state_bytes"]
    assert 1 / num_devices <= share < 1.1 / num_devices
    assert programs["fsdp"]["peak_bytes"] < programs["data"]["peak_bytes"]


def parameter_bytes(answers: dict[str, dict[str, Any]]) -> float:
    """Return the parameters' size in bytes. The state adds two float32 moments per parameter."""
    program = answers["data"]["programs"][0]
    assert program["parameter_bytes"] == pytest.approx(program["state_bytes"] / 3, rel=1e-3)
    return program["parameter_bytes"]


@pytest.mark.parametrize("name", ["data", "pmap"])
def test_devices_only_add_gradients_in_float32(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    found = collectives(answers[name])
    assert set(found) == {("all-reduce", "f32")}
    assert found["all-reduce", "f32"]["bytes"] < 1.01 * parameter_bytes(answers)


def test_fsdp_only_gathers_parameters_and_adds_gradients(
    answers: dict[str, dict[str, Any]],
) -> None:
    found = collectives(answers["fsdp"])
    gathered = sum(c["bytes"] for (kind, _), c in found.items() if kind == "all-gather")
    # Each device rounds its part of a matrix to bfloat16, and then sends it only once.
    assert 0.9 * parameter_bytes(answers) / 2 < gathered < 1.1 * parameter_bytes(answers) / 2
    kinds = {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
    assert {kind for kind, _ in found} <= kinds
    # XLA uses a collective permute only for a few small arrays.
    permuted = sum(c["bytes"] for (kind, _), c in found.items() if kind == "collective-permute")
    assert permuted < parameter_bytes(answers) / 100
