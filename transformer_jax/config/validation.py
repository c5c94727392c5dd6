"""How a section of a config checks its fields: each has a type, and some have rules."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from transformer_jax.errors import ConfigError

Rule = tuple[str, Callable[[Any], bool], str]


class ConfigSection:
    """Base of the dataclasses below: checks types and rules as soon as one is made."""

    name: typing.ClassVar[str]
    rules: typing.ClassVar[tuple[Rule, ...]] = ()

    def __post_init__(self) -> None:
        for key, kind in typing.get_type_hints(type(self)).items():
            if typing.get_origin(kind) is not typing.ClassVar:
                _check_type(f"{self.name}.{key}", kind, getattr(self, key))
        for key, holds, rule in self.rules:
            value = getattr(self, key)
            if value is not None and not holds(value):
                raise ConfigError(f"{self.name}.{key} must be {rule}, got {value!r}")


def positive(*keys: str) -> tuple[Rule, ...]:
    """Return the rule that each of these fields is above zero and finite."""
    return tuple((key, lambda x: 0 < x < math.inf, "positive and finite") for key in keys)


def at_least(bound: float, *keys: str) -> tuple[Rule, ...]:
    """Return the rule that each of these fields is finite and not below `bound`."""
    return tuple(
        (key, lambda x: bound <= x < math.inf, f"at least {bound} and finite") for key in keys
    )


def integer_between(most: int, *keys: str) -> tuple[Rule, ...]:
    """Return the rule that each of these counts is at least one, and within reason."""
    return tuple((key, lambda x: 1 <= x <= most, f"from 1 to {most}") for key in keys)


def probability(*keys: str) -> tuple[Rule, ...]:
    """Return the rule that each of these fields is a probability below one."""
    return tuple((key, lambda x: 0 <= x < 1, "at least 0 and below 1") for key in keys)


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name that looks most like this one, or ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def field_names(kind: type) -> list[str]:
    """Return the names of a section's fields, or of a config's sections."""
    return [f.name for f in dataclasses.fields(kind)]


def check_field_name(name: str, known: list[str], where: str) -> None:
    """Make sure that a name is one of these.

    Raises:
        ConfigError: it is not; the nearest that is, is told.
    """
    if name not in known:
        raise ConfigError(f"unknown field {name!r} of {where}{did_you_mean(name, known)}")


def _check_type(name: str, kind: Any, value: Any) -> None:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise ConfigError(
                f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}"
            )
        return
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    # All tuples here are pairs of strings.
    plain = tuple(typing.get_origin(k) or k for k in allowed)
    # An int is a fine float; a bool is no number, although Python says so.
    accepted = (*plain, int) if float in plain else plain
    if (
        not isinstance(value, accepted)
        or (isinstance(value, bool) and bool not in plain)
        or (isinstance(value, tuple) and [type(v) for v in value] != [str, str])
    ):
        words = {types.NoneType: "None", tuple: "a pair of strings"}
        wanted = " or ".join(words.get(k, k.__name__) for k in plain)
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")
