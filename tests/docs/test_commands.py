"""Test that the commands in the README and the docs have labels and run without errors."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import GUIDES, ROOT, Command, commands, name
from processes import Forks, make_once

from transformer_jax.data.number_words import NumberWords
from transformer_jax.data.splits import SPLITS

LABELS = re.compile(
    r"\d+ (s|min)\b|needs (a GPU|a TPU|hours|Slurm|the network|the sweep|minutes)\b"
)
DEMO = "make demo"
# Skip these commands, because they would run the tests again or need a different environment.
RECURSIVE = ("make test", "make check", "make docs", "pre-commit install")
# These commands build a model for every row of Table 3. CHEAP excludes these commands, so only the
# slow whole-page tests run them. `test_configs` and `test_sweeps` run the same commands for a few
# rows.
ALL_ROWS = re.compile(r"transformer-jax (params|sweep) table3\b")
CHEAP = sorted(
    {c.text for page in GUIDES for c in commands(page) if c.is_cheap and not ALL_ROWS.match(c.text)}
    - {*RECURSIVE}
)
# These commands import JAX, so they run in forks of a process that has already imported it. The
# other commands run in a shell, to test that the shell finds `transformer-jax` in an activated
# environment.
SLOW_TO_IMPORT = tuple(f"transformer-jax {name} " for name in ("params", "prepare", "sweep"))


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


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


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


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_every_command_has_a_label(page: Path) -> None:
    for command in commands(page):
        assert LABELS.match(command.label), command


def is_set_up_by_make() -> bool:
    """Return whether `make` would leave this environment unchanged."""
    installed = Path(sys.prefix) / "installed"
    project = ROOT / "pyproject.toml"
    return installed.exists() and installed.stat().st_mtime >= project.stat().st_mtime


needs_environment = pytest.mark.skipif(
    not is_set_up_by_make(), reason="needs the environment that `make test` sets up"
)


@pytest.mark.slow
@needs_environment
@pytest.mark.parametrize("text", CHEAP)
def test_a_cheap_command_works_in_a_fresh_clone(
    text: str, clone: Path, request: pytest.FixtureRequest
) -> None:
    if not text.startswith(SLOW_TO_IMPORT):
        run(Command(text, ""), clone)
        return
    forks: Forks = request.getfixturevalue("forks")
    log = clone / "log"
    pid = forks.start(*shlex.split(text)[1:], log=log, folder=str(clone))
    assert forks.wait(pid) == 0, log.read_text("utf-8")


def remaining(page: Path) -> list[Command]:
    """Return a page's tested commands, except those in `RECURSIVE` and `CHEAP`."""
    return [c for c in commands(page) if c.is_tested and c.text not in {*RECURSIVE, *CHEAP}]


PICTURE = re.compile(r"(?:--out |\.save\(\")([\w./-]+\.(?:html|png|svg))\b")

# The demo model is trained only once, and the commands on each of these pages use a copy of it.
USE_DEMO = tuple(page for page in GUIDES if "runs/demo" in page.read_text("utf-8"))
# Some commands on these pages use the outputs of commands on other pages, so a single test runs the
# commands from all of these pages in the same clone.
TOGETHER = tuple(
    page for page in USE_DEMO if re.search("sweeps/heads|runs/other", page.read_text("utf-8"))
)
ALONE = tuple((page,) for page in GUIDES if page not in TOGETHER and remaining(page))


def test_each_picture_has_a_name_of_its_own() -> None:
    # `plot` and `attention` do not overwrite files.
    texts = {command.text for page in USE_DEMO for command in commands(page)}
    pictures = [picture for text in texts for picture in PICTURE.findall(text)]
    assert len(pictures) >= 8
    assert sorted(set(pictures)) == sorted(pictures)


def train_demo(folder: Path) -> None:
    """Train the demo model in a new clone, and check that it learns its task."""
    output = run(Command(DEMO, ""), make_clone(folder))
    # The last percentage is the exact-match score on the held-out lines. Training prints the
    # earlier percentages.
    *_, exact = re.findall(r"exact +([0-9.]+)%", output)
    assert float(exact) >= 98


@pytest.mark.slow
@needs_environment
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pages", [TOGETHER, *ALONE], ids=lambda pages: name(pages[0]))
def test_the_commands_of_a_page_work_in_order(
    pages: tuple[Path, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_clone(tmp_path)
    if set(pages) & set(USE_DEMO):
        trained = make_once("demo", tmp_path_factory, train_demo)
        shutil.copytree(trained / "runs" / "demo", folder / "runs" / "demo")
    for command in {c.text: c for page in pages for c in remaining(page)}.values():
        if command.text != DEMO:
            run(command, folder)
