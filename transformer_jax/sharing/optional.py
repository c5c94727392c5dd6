"""Import optional libraries only when they are needed, because this package works without them."""

import importlib
from importlib.util import find_spec
from types import ModuleType

from transformer_jax.errors import UsageError, summarize_error

INTEROP = "'.[interop]'"


def require_library(library: str) -> None:
    """Raise the same error as `import_optional` if a library is missing.

    This function does not import the library.
    """
    if find_spec(library) is None:
        raise _missing(library, INTEROP)


def import_optional(name: str, install: str = INTEROP) -> ModuleType:
    """Import a module; if it is missing, raise a UsageError with the command that installs it.

    The command is `pip install` followed by the value of `install`. If the library is installed but
    broken, the UsageError gives the reason.
    """
    library = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        # The missing module may be a dependency of the library.
        if isinstance(error, ModuleNotFoundError) and error.name in (library, name):
            raise _missing(library, install) from error
        raise UsageError(
            f"{library} is installed, but it cannot be imported: {summarize_error(error)}"
        ) from error


def _missing(library: str, install: str) -> UsageError:
    return UsageError(f"this feature needs {library}: pip install {install}")
