"""Test that the example model in the repository is complete and can translate."""

import hashlib
import subprocess
from pathlib import Path

import pytest
from pages import ROOT

import transformer_jax

FOLDER = ROOT / "examples" / "multi30k"


def test_the_example_model_is_complete_and_small() -> None:
    lines = [line.split("  ") for line in (FOLDER / "SHA256SUMS").read_text("utf-8").splitlines()]
    assert len(lines) > 10
    for digest, name in lines:
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 6e6


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_a_clone_with_windows_line_endings_keeps_every_byte(tmp_path: Path) -> None:
    # The clone uses the .gitattributes file of the last commit.
    options = ["-c", "core.autocrlf=true", "--depth=1", "--quiet"]
    clone = ["git", "clone", *options, f"file://{ROOT}", str(tmp_path / "clone")]
    subprocess.run(clone, check=True, capture_output=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    names = [name for name in listed.stdout.decode().splitlines() if "multi30k" in name]
    assert len(names) > 10
    for name in names:
        assert (tmp_path / "clone" / name).read_bytes() == (ROOT / name).read_bytes(), name


@pytest.mark.slow
def test_the_example_model_translates_a_caption() -> None:
    run = transformer_jax.load(FOLDER)
    assert run.translate(["two dogs play in the snow ."]) == ["zwei hunde spielen im schnee ."]
