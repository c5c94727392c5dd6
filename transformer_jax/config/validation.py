"""Validate config sections: every field has a type, and most numbers have a rule.

A rule is part of the field's annotation:

    num_layers: Annotated[int, Between(1, 1000)] = 6

Types and rules are checked when a section is created.
"""

import abc
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformer_jax.errors import ConfigError


class Rule(abc.ABC):
    """A condition on a number. `str(rule)` completes the sentence "The field must be ..."."""

    @abc.abstractmethod
    def allows(self, value: float) -> bool:
        """Return whether the value satisfies the rule. NaN satisfies no rule."""


@dataclass(frozen=True)
class Between(Rule):
    """The number is from `low` to `high`, inclusive."""

    low: int
    high: int

    def allows(self, value: float) -> bool:
        """Return whether the value is between the bounds, which are allowed."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}"


@dataclass(frozen=True)
class AtLeast(Rule):
    """The number is finite and at least `low`."""

    low: int

    def allows(self, value: float) -> bool:
        """Return whether the value is finite and not below the bound."""
        return self.low <= value < math.inf

    def __str__(self) -> str:
        return f"at least {self.low} and finite"


@dataclass(frozen=True)
class Positive(Rule):
    """The number is finite and above zero."""

    def allows(self, value: float) -> bool:
        """Return whether the value is finite and above zero."""
        return 0 < value < math.inf

    def __str__(self) -> str:
        return "positive and finite"


@dataclass(frozen=True)
class Probability(Rule):
    """The number is at least zero and below one."""

    def allows(self, value: float) -> bool:
        """Return whether the value is at least zero and below one."""
        return 0 <= value < 1

    def __str__(self) -> str:
        return "at least 0 and below 1"


class ConfigSection:
    """Base of the config sections: checks the type and the rules of each field on creation.

    Raises:
        ConfigError: a value has the wrong type or breaks a rule. The message names the field, the
            rule, and the value.
    """

    name: ClassVar[str]
    """The section's name in a config, such as "model"."""

    def __post_init__(self) -> None:
        for key, (kind, rules) in _types_and_rules(type(self)).items():
            field, value = f"{self.name}.{key}", getattr(self, key)
            _check_type(field, kind, value)
            for rule in rules:
                if value is not None and not rule.allows(value):
                    raise ConfigError(f"{field} must be {rule}, got {value!r}")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar known name, or "" if none is similar."""
    match = closest(name, known)
    return "" if match is None else f"; did you mean {match!r}?"


def field_names(kind: type) -> list[str]:
    """Return the names of a section's fields, or of a config's sections."""
    return [f.name for f in dataclasses.fields(kind)]


def check_field_name(name: str, known: list[str], owner: str) -> None:
    """Check that `name` is one of the known fields of `owner`.

    Raises:
        ConfigError: the field is unknown. The message suggests the closest name.
    """
    if name not in known:
        raise ConfigError(f"unknown field {name!r} of {owner}{did_you_mean(name, known)}")


@functools.cache
def _types_and_rules(section: type) -> dict[str, tuple[Any, tuple[Rule, ...]]]:
    hints = typing.get_type_hints(section, include_extras=True)
    fields: dict[str, tuple[Any, tuple[Rule, ...]]] = {}
    for key in field_names(section):
        kind, *metadata = (
            typing.get_args(hints[key])
            if typing.get_origin(hints[key]) is typing.Annotated
            else (hints[key],)
        )
        fields[key] = kind, tuple(rule for rule in metadata if isinstance(rule, Rule))
    return fields


def _check_type(field: str, kind: Any, value: object) -> None:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise ConfigError(
                f"{field} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}"
            )
        return
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    # Every tuple field is a pair of strings.
    plain = tuple(typing.get_origin(k) or k for k in allowed)
    # A float field accepts an int. A number field rejects a bool, although bool subclasses int.
    accepted = (*plain, int) if float in plain else plain
    if (
        not isinstance(value, accepted)
        or (isinstance(value, bool) and bool not in plain)
        or (isinstance(value, tuple) and [type(v) for v in value] != [str, str])
    ):
        words = {types.NoneType: "None", tuple: "a pair of strings"}
        wanted = " or ".join(words.get(k, k.__name__) for k in plain)
        raise ConfigError(f"{field} must be {wanted}, got {value!r}")
