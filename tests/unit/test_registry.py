"""Test the registration of parts from this package, from files, and from notebooks."""

import importlib
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from flax import linen as nn

import transformer_jax
from transformer_jax import Config, ConfigError, UsageError, registry
from transformer_jax.config.loading import (
    import_arguments,
    import_file,
    import_inherited,
    load_rows,
)
from transformer_jax.config.schema import PART_FIELDS
from transformer_jax.registry import imported_files

SQUARED = """
import transformer_jax

@transformer_jax.register("model.activation", "{name}")
def square(x):
    return x * x
"""


pytestmark = pytest.mark.usefixtures("forget_parts")


def write(folder: Path, name: str = "square", file: str = "my_part.py") -> Path:
    path = folder / file
    path.write_text(SQUARED.format(name=name))
    return path


def test_a_registered_name_is_a_valid_value_and_selects_the_part(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"must be one of .*'relu'.*, got 'square'; if your own file"
    ):
        Config().change(model={"activation": "square"})
    import_file(str(write(tmp_path)))
    config = Config().change(model={"activation": "square"})
    square = registry.Registry[object]("model.activation")[config.model.activation]
    assert callable(square)
    assert square(3) == 9


def test_a_description_names_only_foreign_parts_and_the_digest_of_their_file(
    tmp_path: Path,
) -> None:
    file = write(tmp_path)
    import_file(str(file))
    assert registry.describe_foreign(Config().parts()) == {}
    parts = Config().change(model={"activation": "square"}).parts()
    digest = sha256(file.read_bytes()).hexdigest()
    expected = {"name": "square", "file": "my_part.py", "sha256": digest}
    assert registry.describe_foreign(parts) == {"model.activation": expected}


def test_a_part_that_is_registered_again_has_the_digest_of_the_new_code(tmp_path: Path) -> None:
    file = write(tmp_path)
    for code in (file.read_text(), file.read_text() + "\n"):
        file.write_text(code)
        exec(compile(code, file, "exec"), {})  # noqa: S102 - the code is this file's
        parts = Config().change(model={"activation": "square"}).parts()
        described = registry.describe_foreign(parts)["model.activation"]
        assert described["sha256"] == sha256(code.encode()).hexdigest()


def test_a_description_is_text_even_if_the_name_of_the_file_is_not(tmp_path: Path) -> None:
    import_file(str(write(tmp_path, file="gr\udcf6sse.py")))
    parts = Config().change(model={"activation": "square"}).parts()
    described = registry.describe_foreign(parts)["model.activation"]
    assert described["file"] == "gr\ufffdsse.py"


def test_a_notebook_can_register_a_part_again() -> None:
    for _ in range(2):
        code = compile(SQUARED.format(name="square"), "<cell 1>", "exec")
        exec(code, {})  # noqa: S102 - the code is this file's
    parts = Config().change(model={"activation": "square"}).parts()
    assert registry.describe_foreign(parts) == {"model.activation": {"name": "square"}}


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        ("model.nrom", "x", "^model.nrom is not a config field that selects parts"),
        ("model.d_k", "x", "^model.d_k is not a config field that selects parts"),
        ("model.activation", "My Norm", "must start with a letter .*, got 'My Norm'$"),
        ("model.activation", "relu", "'relu' is already registered by .*: choose another name$"),
    ],
)
def test_an_invalid_registration_is_one_clear_error(field: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_jax.register(field, name)(lambda x: x)


def test_two_files_cannot_register_the_same_name(tmp_path: Path) -> None:
    import_file(str(write(tmp_path)))
    with pytest.raises(UsageError, match=r"cannot import .*'square' is already registered by"):
        import_file(str(write(tmp_path, file="other.py")))


def test_a_file_that_registers_a_name_twice_is_one_error_with_both_lines(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(file.read_text() * 2)
    message = "'square' is registered twice in my_part.py, on line 4 and on line 10: choose another"
    with pytest.raises(UsageError, match=message):
        import_file(str(file))


def test_a_module_can_be_reloaded_after_its_lines_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, file="moved_part.py")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("moved_part")
    file.write_text("\n\n" + file.read_text().replace("x * x", "x * x * x"))
    importlib.reload(module)
    assert registry.Registry[Any]("model.activation")["square"](2) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 / 0\n", "line 1: ZeroDivisionError: division by zero$"),
        ("\ndef f(:\n", "line 2: SyntaxError: "),
        ("import nothing_with_this_name\n", "line 1: ModuleNotFoundError: No module named"),
    ],
)
def test_an_error_in_a_file_names_its_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        import_file(str(file))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.py", "there is no such file"),
        ("folder", "there is no such file"),
        ("text.txt", "it is not a Python file"),
    ],
)
def test_only_python_files_can_be_imported(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(UsageError, match=rf"^cannot import .*: {reason}"):
        import_file(str(tmp_path / name))


def test_child_processes_import_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    import_file("my_part.py")
    assert import_arguments() == ["--import", "my_part.py"]
    registry._parts["model.activation"].pop("square")
    import_inherited()
    assert Config().change(model={"activation": "square"}).model.activation == "square"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert import_arguments() == ["--import", str(file)]


def test_child_processes_import_files_whatever_their_names(tmp_path: Path) -> None:
    names = ("a:b.py", "größe 100%.py", "gr\udcf6sse.py")
    files = [write(tmp_path, f"square_{i}", name) for i, name in enumerate(names)]
    for file in files:
        import_file(str(file))
    assert imported_files() == files
    import_inherited()
    assert imported_files() == files


def test_every_field_that_selects_a_part_has_a_registry() -> None:
    fields = set(PART_FIELDS)
    # This field selects several parts.
    assert {*fields, "train.trackers"} == set(registry._parts)


def test_a_module_without_a_config_is_rejected_when_it_is_registered() -> None:
    class Plain(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"^the class of model.norm 'plain' has no field named c"):
        transformer_jax.register("model.norm", "plain")(Plain)


def test_a_dataclass_that_is_not_a_module_needs_no_config() -> None:
    @transformer_jax.register("model.activation", "scaled_square")
    @dataclass(frozen=True)
    class ScaledSquare:
        scale: float = 2.0

    assert registry.Registry[type]("model.activation")["scaled_square"] is ScaledSquare


SWEEP_FILE = """
import my_part

import transformer_jax

BASE = transformer_jax.Config()
SWEEP = {"base": BASE, "square": BASE.change(model={"activation": "square"})}
"""


def test_child_processes_import_a_module_that_a_config_file_imports(tmp_path: Path) -> None:
    file = write(tmp_path)
    (tmp_path / "sweep.py").write_text(SWEEP_FILE)
    assert set(load_rows(str(tmp_path / "sweep.py"))) == {"base", "square"}
    assert imported_files() == [file]


def test_a_part_that_a_module_registers_is_imported_by_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_part")
    assert imported_files() == [file]
    del sys.modules["my_part"]


def test_a_script_that_trains_without_a_main_guard_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import transformer_jax\n\ntransformer_jax.train('tiny', 'runs/x')\n")
    with pytest.raises(UsageError, match=r"calls train while it is imported: call it only under"):
        import_file(str(file))


def test_a_sweep_rejects_a_part_that_its_processes_cannot_import(tmp_path: Path) -> None:
    exec(compile(SQUARED.format(name="square"), "<cell 1>", "exec"), {})  # noqa: S102
    config = Config().change(model={"activation": "square"})
    with pytest.raises(UsageError, match=r"^model.activation 'square' is not registered by a file"):
        transformer_jax.sweep({"square": config}, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
