"""Import libraries that are not dependencies of this package, at the place where they are used."""

import importlib
from types import ModuleType

from transformer_jax.errors import UsageError


def import_optional(name: str, install: str = "'.[interop]'") -> ModuleType:
    """Import a module; if it is missing, raise a UsageError that names the command to install it.

    `install` is the argument of pip.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise UsageError(f"this needs {library}: pip install {install}") from error
