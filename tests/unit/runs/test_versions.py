"""Test that results can record the commit of the package that produced them."""

import subprocess
from pathlib import Path

import pytest

from transformer_jax.runs import versions


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
