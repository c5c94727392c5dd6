"""Test that a package exports names without importing the modules that define them."""

import pytest

from transformer_jax.exports import lazy_exports
from transformer_jax.files import write_json


def test_a_name_is_found_in_its_module_and_others_are_missing() -> None:
    get = lazy_exports("package", {"write_json": "files", "broken": "no_such_module"})
    assert get("write_json") is write_json
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'other'"):
        get("other")
