"""Test that a package exports names without importing the modules that define them."""

import importlib
from pathlib import Path

import pytest

from transformer_jax.files import write_json

PACKAGE = """
from typing import TYPE_CHECKING

from transformer_jax.exports import lazy_exports

if TYPE_CHECKING:
    from transformer_jax.files import write_json
    from no_such_module import broken

__getattr__ = lazy_exports(__name__)
"""


def test_a_name_is_found_in_its_module_and_others_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    lazy_package = importlib.import_module("lazy_package")
    assert lazy_package.write_json is write_json
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lazy_package.broken  # noqa: B018
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'other'"):
        lazy_package.other  # noqa: B018
