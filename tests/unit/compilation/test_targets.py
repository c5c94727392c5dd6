"""Test how compilation targets are parsed. Parsing does not need a compiler."""

import re
import subprocess
import sys

import pytest
from pages import ROOT

from transformer_jax.compilation.targets import GIB, KINDS, TPUS, Target, parse_target
from transformer_jax.errors import UsageError


@pytest.mark.parametrize(
    ("text", "target", "topology", "devices", "hosts"),
    [
        ("v5e", Target("v5e", (1, 1)), "v5e:1x1", 1, 1),
        ("v5e:2x4", Target("v5e", (2, 4)), "v5e:2x4", 8, 1),
        ("v5e:4x4", Target("v5e", (4, 4)), "v5e:4x4", 16, 4),
        ("v4:2x2x4", Target("v4", (2, 2, 4)), "v4:2x2x4", 16, 4),
        # A tpu7x chip has two devices.
        ("tpu7x:2x2x1", Target("tpu7x", (2, 2, 1)), "tpu7x:2x2x1", 8, 1),
        ("h200", Target("h200", (1, 1)), "1x1x1", 1, 1),
        ("h100:8", Target("h100", (1, 8)), "1x1x8", 8, 1),
        ("h100:16", Target("h100", (2, 8)), "1x2x8", 16, 2),
        ("a100-80:4x2", Target("a100-80", (4, 2)), "1x4x2", 8, 4),
    ],
)
def test_a_target_names_a_number_of_devices_and_hosts(
    text: str, target: Target, topology: str, devices: int, hosts: int
) -> None:
    parsed = parse_target(text)
    assert parsed == target
    assert parsed.topology == topology
    assert (parsed.num_devices, parsed.num_hosts) == (devices, hosts)
    assert parse_target(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5q:2x4", "no target 'v5q'; did you mean 'v5p'? (available: v4, v5e,"),
        ("", "no target ''"),
        ("v5e-8", "no target 'v5e-8'; did you mean 'v5e'?"),
        ("v5e:8", "a v5e slice has 2 dimensions, such as v5e:2x4, got 'v5e:8'"),
        ("v5p:2x4", "a v5p slice has 3 dimensions, such as v5p:2x2x1"),
        ("v5e:3x5", "a v5e slice consists of hosts with 2x2 chips, got 'v5e:3x5'"),
        ("v5e:0x4", "a target is KIND or KIND:SHAPE, such as v5e:2x4, got 'v5e:0x4'"),
        ("h100:", "a target is KIND or KIND:SHAPE, such as h100:8, got 'h100:'"),
        ("h100:12", "h100:12 cannot be divided into hosts with 8 GPUs; name the hosts"),
        ("h100:1x2x8", "GPUs are h100:GPUS or h100:HOSTSxGPUS"),
        ("h100:99999x99999", "a target has at most 65,536 devices"),
    ],
)
def test_an_invalid_target_is_a_usage_error_that_says_what_is_valid(
    text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_target(text)


def test_programs_can_use_the_memory_that_jax_reserves() -> None:
    assert parse_target("v5e").capacity == 15.75 * GIB
    # Programs can use 75% of the 84,942,979,072 bytes that the driver reports.
    assert parse_target("h100").capacity == 63_707_234_304


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TPUS])
def test_each_gpu_description_names_its_sources_and_its_memory(kind: str) -> None:
    target = parse_target(kind)
    assert "# Sources: " in target.gpu_description
    assert target.gpu_description.count("{") == target.gpu_description.count("}")
    assert target.capacity > 20 * GIB


def test_each_file_of_gpu_descriptions_is_a_kind() -> None:
    folder = ROOT / "transformer_jax/compilation/gpus"
    assert {path.stem for path in folder.glob("*.txtpb")} == {*KINDS} - {*TPUS}


def test_parsing_targets_does_not_import_jax() -> None:
    modules = "transformer_jax.compilation.targets, transformer_jax.compilation.environment"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
