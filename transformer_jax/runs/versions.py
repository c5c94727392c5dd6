"""The versions of the software that created a run."""

import importlib.metadata
import platform
import subprocess
import tomllib
from pathlib import Path

PACKAGES = (
    *("flax", "jax", "jaxlib", "num2words", "numpy", "optax"),
    *("orbax-checkpoint", "sentencepiece"),
)


def package_version() -> str:
    """Return this package's version, even if the package runs from its source folder."""
    try:
        return importlib.metadata.version("transformer-jax")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.exists():
            return "unknown"
        return tomllib.loads(project.read_text("utf-8"))["project"]["version"]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that may affect results."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **versions, "transformer-jax": package_version()}


def source_commit() -> str:
    """Return this package's Git commit, with "+" for uncommitted changes, or "" if unknown."""
    file = Path(__file__)
    is_tracked = ["git", "ls-files", "--error-unmatch", file.name]
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        for command in (is_tracked, describe):
            output = subprocess.run(  # noqa: S603 - the commands are constant
                command, cwd=file.parent, capture_output=True, check=True
            ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return output.decode(errors="replace").strip()


def current_versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages, and the commit if it is known."""
    commit = source_commit()
    return {**installed_versions(), **({"commit": commit} if commit else {})}
