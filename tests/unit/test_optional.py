import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import ROOT

from transformer_jax.errors import UsageError
from transformer_jax.optional import import_optional, install_command, require_library


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on Python's import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("find", [import_optional, require_library])
def test_a_missing_library_names_the_command_to_install_it(
    find: Callable[[str], object],
) -> None:
    with pytest.raises(UsageError, match=r"^this feature needs absent: pip install absent$"):
        find("absent")


def test_commands_install_what_the_extras_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    installed = {re.split("[>=]", x)[0] for extra in extras.values() for x in extra}
    libraries = ("ctranslate2", "safetensors", "submitit", "libtpu", "JAX's CUDA plugin")
    for library in libraries:
        assert install_command(library).removeprefix("pip install ").strip("'") in installed


def test_no_message_names_an_extra_of_the_clone() -> None:
    """Outside the clone, pip rejects `.[EXTRA]`."""
    for path in (ROOT / "transformer_jax").rglob("*.py"):
        found = re.findall(r"pip install '?\.\[", path.read_text("utf-8"))
        assert not found, path


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import absent_dependency", "No module named 'absent_dependency'"),
        ("raise ImportError('no symbol\\nin a.so')", "no symbol"),
        ("raise OSError('libgomp.so.1: cannot open')", "libgomp.so.1: cannot open"),
    ],
)
def test_a_broken_library_is_not_reported_as_missing(
    libraries: Path, code: str, reason: str
) -> None:
    (libraries / "broken_library.py").write_text(code, "utf-8")
    require_library("broken_library")
    with pytest.raises(UsageError) as refused:
        import_optional("broken_library")
    expected = f"broken_library is installed, but it cannot be imported: {reason}"
    assert str(refused.value) == expected
