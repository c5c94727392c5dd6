"""Test that the names of modules and tests match, and that unit tests are in matching folders."""

import ast
from pathlib import Path

import pytest
from pages import ROOT

PACKAGE = ROOT / "transformer_jax"
UNIT = ROOT / "tests" / "unit"
# These files test something other than a module, a subpackage, or a config.
OTHERS = {
    "analysis/test_head_mask.py": "parameters without some heads",
    "model/variants/test_attention_scores.py": "attention scores with parameters",
    "model/variants/test_key_value_heads.py": "heads that share keys; foreign attention",
    "model/variants/test_output_bias.py": "the options of Marian models",
    "model/variants/test_positional_encodings.py": "variants of the encodings",
    "model/variants/test_pre_norm.py": "normalization before each sub-layer",
    "sharing/test_safetensors_format.py": "the safetensors format",
    "test_layout.py": "the paths of the files in this folder",
    "test_wheel.py": "the wheel, which contains the package and its data",
}
# The tests of these modules have different names, for the given reasons.
TESTED_ELSEWHERE = {
    "commands/arguments.py": "test_cli.py runs commands with mistakes in their arguments",
    "commands/help.py": "test_cli.py prints help and completes words in a shell",
    "distributed/failure_propagation.py": "test_processes.py and test_multi_process.py stop groups",
    "remote/session.py": "test_copies.py trains runs in buckets",
    "remote/transfer.py": "test_copies.py copies runs to buckets, and back",
    "training/member.py": "test_loop.py trains one member, and test_joint.py several",
}


def has_counterpart(path: Path) -> bool:
    """Return whether a test's path, relative to `UNIT`, mirrors that of a module or config."""
    folder, name = path.parent, path.stem.removeprefix("test_")
    # A test file's name omits the leading underscore of a private module.
    names = (f"{name}.py", f"_{name}.py", f"{name}/__init__.py")
    package = PACKAGE / folder
    return any((package / x).is_file() for x in names) or (
        folder == Path("configs") and (ROOT / folder / f"{name}.py").is_file()
    )


def test_each_file_is_at_the_path_of_the_module_that_it_tests() -> None:
    paths = [path.relative_to(UNIT) for path in UNIT.rglob("*.py")]
    assert len(paths) > 100
    assert {str(path) for path in paths if not has_counterpart(path)} == set(OTHERS)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("test_cli.py", True),
        ("model/variants/test_sub_layers.py", True),
        ("model/test_variants.py", True),
        ("distributed/test_private_jax.py", True),
        ("configs/test_table3.py", True),
        ("test_sub_layers.py", False),
        ("model/test_sub_layers.py", False),
        ("test_table3.py", False),
        ("model/variants/test_nothing.py", False),
    ],
)
def test_a_file_in_another_folder_has_no_counterpart(path: str, expected: bool) -> None:
    assert has_counterpart(Path(path)) == expected


def has_logic(path: Path) -> bool:
    """Return whether a module defines a function."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return path.stem != "__init__" and any(isinstance(x, ast.FunctionDef) for x in nodes)


def test_each_module_with_logic_has_a_unit_test_or_an_integration_test_of_its_name() -> None:
    untested: set[str] = set()
    for path in filter(has_logic, PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        name = f"test_{module.stem.removeprefix('_')}.py"
        places = (UNIT / module.parent / name, ROOT / "tests" / "integration" / name)
        if not any(place.is_file() for place in places):
            untested.add(module.as_posix())
    assert untested == {name for name in TESTED_ELSEWHERE if (PACKAGE / name).is_file()}
