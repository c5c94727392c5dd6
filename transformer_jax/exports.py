"""Export names from modules that are imported only when one of the names is first used."""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def lazy_exports(package: str) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a name when it is first used.

    The package's `if TYPE_CHECKING:` block imports each name from its module.
    """

    @functools.cache
    def find_modules() -> dict[str, str]:
        path = Path(sys.modules[package].__file__ or "")
        body = ast.parse(path.read_text("utf-8")).body
        block = next(node for node in body if isinstance(node, ast.If)).body
        imports = [node for node in block if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in (modules := find_modules()):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
