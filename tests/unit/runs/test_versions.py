"""Test that results can record the commit of the package that produced them."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from processes import run_python

from transformer_jax.runs import versions


def test_commands_run_from_a_source_folder_without_an_installed_package(tmp_path: Path) -> None:
    # An empty path hides the metadata of the package, but not of its dependencies.
    code = """
import importlib.metadata, sys
distribution = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name == "transformer-jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
from transformer_jax.cli import main
from transformer_jax.runs.versions import current_versions
assert main(["version"]) == 0
print(current_versions()["transformer-jax"])
"""
    source = str(Path(versions.__file__).parents[2])
    result = run_python(code, cwd=tmp_path, PYTHONPATH=source)
    version = importlib.metadata.version("transformer-jax")
    assert (result.returncode, result.stdout) == (0, f"{version}\n{version}\n"), result.stderr


def test_the_source_commit_is_that_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    file = tmp_path / "versions.py"
    file.touch()
    monkeypatch.setattr(versions, "__file__", str(file))
    assert versions.source_commit() == ""
    git("init")
    # An installed package may be inside a repository that does not track it.
    git("commit", "--allow-empty", "-m", "other")
    assert versions.source_commit() == ""
    git("add", "versions.py")
    git("commit", "-m", "package")
    assert versions.source_commit() == git("rev-parse", "--short=12", "HEAD")
    file.write_text("changed")
    assert versions.source_commit() == git("rev-parse", "--short=12", "HEAD") + "+"
