"""Versions of the software that created a run."""

import importlib.metadata
import platform

PACKAGES = (
    *("flax", "jax", "jaxlib", "num2words", "numpy", "optax"),
    *("orbax-checkpoint", "sentencepiece", "transformer-jax"),
)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a result."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **versions}
