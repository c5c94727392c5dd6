"""Import optional libraries only when they are needed, because this package works without them."""

import importlib
from importlib.util import find_spec
from types import ModuleType

from transformer_jax.errors import UsageError, summarize_error

# The argument to `pip install` for each library. For other libraries, the argument is the library's
# name. These requirements work in every folder, whereas `.[EXTRA]` works only in a clone of the
# repository.
REQUIREMENTS = {
    "JAX's CUDA plugin": "'jax[cuda13]'",
    "libtpu": "'jax[tpu]'",
    "MeCab": "'sacrebleu[ja]'",
    "mecab_ko": "'sacrebleu[ko]'",
    "torch": "'torch>=2.10'",
    "transformers": "'transformers>=5'",
}


def install_command(library: str) -> str:
    """Return the command that installs an optional library."""
    return f"pip install {REQUIREMENTS.get(library, library)}"


def missing_library(library: str, feature: str = "this feature") -> UsageError:
    """Return the error for a feature whose library is not installed."""
    return UsageError(f"{feature} needs {library}: {install_command(library)}")


def require_library(library: str) -> None:
    """Raise the same error as `import_optional` if a library is missing, without importing it."""
    if find_spec(library) is None:
        raise missing_library(library)


def import_optional(name: str, feature: str = "this feature") -> ModuleType:
    """Import a module; raise a UsageError that says how to install it or why the import fails."""
    library = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        # The missing module may be a dependency of the library.
        if isinstance(error, ModuleNotFoundError) and error.name in (library, name):
            raise missing_library(library, feature) from error
        raise UsageError(
            f"{library} is installed, but it cannot be imported: {summarize_error(error)}"
        ) from error
