"""Export names from modules that are imported only when one of the names is first used."""

import importlib
from collections.abc import Callable, Mapping


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's `__getattr__`; `modules` maps each name to the module that defines it."""

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"transformer_jax.{modules[name]}"), name)

    return get
