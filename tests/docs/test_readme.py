"""The README's commands do what they say: each "tested" one is run, as it is written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import SPLITS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
LABELS = ("tested", "needs GPU", "needs TPU", "needs hours", "needs Slurm")
# It would run itself.
ITSELF = ("make test", "make test-all", ".ci/run")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Return each command of the README with its label."""
    found = []
    for line in "".join(blocks("sh")).splitlines():
        command, _, comment = line.partition("  # ")
        found.append((command.strip(), comment.strip()))
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files under version control, with this environment as its own."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    # A reader's own text.
    for split in SPLITS:
        pairs = NumberWords(400).read(split)
        for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines[: 400 if split == "train" else 40])
            (folder / f"{split}.{language}").write_text(text, "utf-8")
    return folder


def run(command: list[str], clone: Path) -> str:
    # As a user's shell: none of what the tests set for themselves, but for the cache.
    hidden = ("JAX_", "PYTEST_", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_has_a_label() -> None:
    assert len(commands()) > 8
    for command, comment in commands():
        assert comment.startswith(LABELS), command


def test_every_file_that_the_readme_names_is_there() -> None:
    named = re.findall(r"\]\(([^)#:]+)\)", README)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def is_set_up_by_make() -> bool:
    """Tell whether `make` would leave this environment as it is."""
    installed = Path(sys.prefix) / "installed"
    project = ROOT / "pyproject.toml"
    return installed.exists() and installed.stat().st_mtime >= project.stat().st_mtime


@pytest.mark.skipif(not is_set_up_by_make(), reason="run by `make test`, which sets things up")
def test_the_tested_commands_work_one_after_the_other(clone: Path) -> None:
    tested = [c for c, label in commands() if label.startswith("tested") and c not in ITSELF]
    told = {}
    for command in tested:
        told[command] = run(["bash", "-c", f"source .venv/bin/activate; {command}"], clone)
    # The last one is of the held-out lines; those before it are of the training's own progress.
    *_, exact = re.findall(r"exact +([0-9.]+)%", told["make demo"])
    assert float(exact) >= 98
    for snippet in blocks("python"):
        run([str(clone / ".venv/bin/python"), "-c", snippet], clone)
