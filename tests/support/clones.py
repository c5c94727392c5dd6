"""Run a user's commands in a copy of the repository, and train the demo there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Command

from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import SPLITS

DEMO = "make demo"


def make_clone(folder: Path) -> Path:
    """Copy all files that Git does not ignore, and link this environment into the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in listed.stdout.splitlines():
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    (folder / ".venv").unlink(missing_ok=True)
    (folder / ".venv").symlink_to(sys.prefix)
    # The documentation calls the reader's text files train.en, train.de, and so on.
    for split in SPLITS:
        pairs = NumberWords(400).read(split)
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines[: 400 if split == "train" else 40])
            (folder / f"{split}.{language}").write_text(text, "utf-8")
    return folder


def run(command: Command, clone: Path) -> str:
    if command.path is not None:
        (clone / command.path).parent.mkdir(parents=True, exist_ok=True)
        (clone / command.path).write_text(command.text, "utf-8")
        return ""
    # A user's shell does not have the environment variables that the tests set, so remove all of
    # them except `TRANSFORMER_JAX_CACHE`.
    hidden = ("JAX_", "PYTEST_", "PYTHONPATH", "XLA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    if command.language == "python":
        arguments = [str(clone / ".venv/bin/python"), "-c", command.text]
    else:
        arguments = ["bash", "-c", f"source .venv/bin/activate; {command.text}"]
    done = subprocess.run(arguments, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_set_up_by_make() -> bool:
    """Return whether `make` would leave this environment unchanged."""
    installed = Path(sys.prefix) / "installed"
    project = ROOT / "pyproject.toml"
    return installed.exists() and installed.stat().st_mtime >= project.stat().st_mtime


needs_environment = pytest.mark.skipif(
    not is_set_up_by_make(), reason="needs the environment that `make test` sets up"
)


def train_demo(folder: Path) -> None:
    """Train the demo model in a new clone, and store what `make demo` prints in demo.log."""
    output = run(Command(DEMO, ""), make_clone(folder))
    (folder / "demo.log").write_text(output, "utf-8")
