"""Test that the wheel contains the data files that the package reads."""

import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pages import ROOT

from transformer_jax.compilation.targets import KINDS, TPUS
from transformer_jax.visualization.attention_html import SCRIPTS

PAGE = "transformer_jax/visualization/attention_page"
NEEDED = {
    "transformer_jax/py.typed",
    *(f"{PAGE}/{name}" for name in ("page.html", "style.css", *SCRIPTS)),
    *(f"transformer_jax/compilation/gpus/{kind}.txtpb" for kind in KINDS if kind not in TPUS),
    *(f"transformer_jax/shipped/configs/{path.name}" for path in ROOT.glob("configs/*.py")),
}


def git_files(*options: str) -> set[str]:
    """Return the files that `git ls-files` lists, or skip the test outside a Git checkout."""
    command = ["git", "ls-files", "-z", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    return set(filter(None, done.stdout.split("\0")))


@pytest.fixture
def wheel_files() -> set[str]:
    """The files in the wheel. Hatchling omits files that Git ignores, even if they are tracked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    # Other keys, such as `exclude`, would change which files the wheel contains.
    assert set(wheel) == {"packages", "force-include"}
    assert set(project["tool"]["hatch"]["build"]) == {"targets"}
    kept = git_files("--cached", "--others", "--exclude-standard")
    kept -= git_files("--cached", "--ignored", "--exclude-standard")
    # pyproject.toml maps each source folder to a folder in the wheel.
    folders = {name: name for name in wheel["packages"]} | wheel["force-include"]
    return {
        f"{target}/{Path(file).relative_to(source)}"
        for source, target in folders.items()
        for file in kept
        if Path(file).is_relative_to(source)
    }


def test_the_wheel_contains_the_configs_and_the_data_that_the_package_reads(
    wheel_files: set[str],
) -> None:
    assert len(NEEDED) > 20
    assert NEEDED - wheel_files == set()


def test_hatchling_puts_these_files_into_the_wheel(wheel_files: set[str]) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling, which builds the wheel")
    builder = import_module("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    included: Iterator[str] = (x.distribution_path for x in builder.recurse_included_files())
    assert set(included) == wheel_files


def test_the_dockerfile_copies_what_the_build_context_contains() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    assert needed | {"pyproject.toml", "constraints.txt", "transformer_jax"} == copied
