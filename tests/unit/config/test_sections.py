"""Test that sections reject invalid values with a message that names the field."""

import ast
import inspect
import itertools
import types
import typing
from typing import Any, Literal

import pytest
from example_configs import FIELDS, KINDS, NUMBERS, RANGES, alternatives

from transformer_jax.config import sections as config_module
from transformer_jax.errors import ConfigError


def wrong_values(kind: Any) -> list[object]:
    """Return a list of values that a field of this type must reject."""
    if typing.get_origin(kind) is Literal:
        return ["other", None, 3, [], True]
    allowed = alternatives(kind)
    wrong: list[object] = [[], {}, 1j, ("one", 2)]
    wrong += [] if tuple[str, ...] in allowed else [("one",), ("a", "b", "c")]
    wrong += [] if str in allowed else ["text"]
    wrong += [] if {tuple[str, str], tuple[str, ...]} & {*allowed} else [("a", "b")]
    wrong += [] if bool in allowed else [True, False]
    wrong += [0, 1] if allowed == (bool,) else []
    wrong += [] if float in allowed else [1.5]
    wrong += [] if types.NoneType in allowed else [None]
    return wrong


def test_a_value_of_the_wrong_type_is_reported_with_its_field() -> None:
    for kind, key in FIELDS:
        for value in wrong_values(KINDS[kind, key]):
            with pytest.raises(ConfigError) as caught:
                kind(**{key: value})
            message = str(caught.value)
            assert message.startswith(f"{kind.name}.{key} must be ")
            assert f"got {value!r}" in message
            assert "\n" not in message


def test_a_number_outside_its_range_is_reported_with_its_field() -> None:
    for kind, key in NUMBERS:
        low, high, invalid = RANGES[key]
        is_integer = int in alternatives(KINDS[kind, key])
        for value in (low, high):
            assert getattr(kind(**{key: value}), key) == value
        for value in invalid:
            with pytest.raises(ConfigError) as caught:
                kind(**{key: value})
            assert str(caught.value).startswith(f"{kind.name}.{key} must be ")
            assert str(caught.value).endswith(f"got {value!r}")
            # The value has the right type, so the error must be about its range.
            assert isinstance(value, int) is is_integer


def test_every_field_has_a_docstring_for_the_help() -> None:
    tree = ast.parse(inspect.getsource(config_module))
    described = {
        (node.name, first.target.id)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for first, second in itertools.pairwise(node.body)
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
        if isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
        if isinstance(second.value.value, str)
    }
    assert {(kind.__name__, key) for kind, key in FIELDS} <= described
