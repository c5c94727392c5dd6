"""Validate config sections. Every field has a type, and most numeric fields have a rule.

Rules and marks are part of the field's annotation:

    remat: Annotated[bool, UsedBy("transformer"), ON_RESUME, ON_INIT_FROM] = False
    d_ff: Annotated[int, between(1, 1_000_000), UsedBy("transformer")] = 2048

Types and rules are checked when a section is created.
"""

import collections.abc
import copy
import dataclasses
import difflib
import functools
import inspect
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar

from transformer_jax.errors import ConfigError, UsageError
from transformer_jax.registry import foreign_names

# An integer above this limit cannot be converted to a float.
LARGEST = sys.float_info.max
# The smallest normal number and the largest number in float32, in which JAX stores numbers.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 3.4028234e38
MAX_COUNT = 2**31 - 1
# Python represents the bytes of a file name that are not UTF-8 as surrogates.
SURROGATE = re.compile("[\ud800-\udfff]")

TypeForm = Any
"""A type in an annotation: a class such as int, or a form such as `int | None` or a Literal."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on a number. A rule never allows NaN."""

    words: str
    """A phrase that completes the sentence "The field must be ..."."""
    allows: Callable[[float], bool]


def between(low: int, high: int) -> Rule:
    """Allow numbers from `low` to `high`, inclusive."""
    return Rule(f"from {low} to {high}", lambda value: low <= value <= high)


def at_least(low: int) -> Rule:
    """Allow numbers greater than or equal to `low` that are finite in float32."""
    return Rule(f"at least {low} and finite", lambda value: low <= value <= LARGEST_FLOAT32)


COUNT = between(1, MAX_COUNT)
POSITIVE = Rule(
    "positive and finite in float32", lambda x: SMALLEST_FLOAT32 <= x <= LARGEST_FLOAT32
)
PROBABILITY = Rule("at least 0 and below 1 in float32", lambda value: 0 <= value <= 1 - 2.0**-24)


class PartName:
    """A rule for a field that selects a registered part (see `transformer_jax.registry`)."""

    def __init__(self, *own: str) -> None:
        """Store the names of this package's parts, before the parts themselves are imported."""
        self.own = own

    def check(self, field: str, name: str) -> None:
        """Raise a ConfigError if no part is registered under this name."""
        foreign = foreign_names(field)
        if name not in self.own and name not in foreign:
            names = (*self.own, *foreign)
            advice = advise_import(name, names)
            rule = f"one of {', '.join(map(repr, names))}"
            raise ConfigError.from_field(field, rule, name, advice)


class UsedBy:
    """The architectures that use a field. All architectures use a field without this mark."""

    def __init__(self, *architectures: str) -> None:
        self.architectures = architectures


@dataclass(frozen=True)
class Mark:
    """A property of a field that does not limit its values."""

    words: str
    """A phrase that completes the sentence "The field ..."."""


ON_RESUME = Mark("may change when a run resumes, because the run stays the same experiment")
ON_INIT_FROM = Mark(
    "may differ between a new run and the run that provides its parameters, because it affects "
    "only training, speed, rounding, or the maximum lengths"
)
NUMBER = Mark("is an argument of a compiled training step, unless it is None")
NUMBER_UNLESS_ZERO = Mark(
    "is an argument of a compiled training step, unless it is 0 and thus removes an operation"
)


class NamedFields:
    """Base class for dataclasses that report a misspelled field with the most similar name."""

    def __new__(cls, *_: object, **fields: object) -> Self:
        """Raise a ConfigError if one of the fields does not exist."""
        for key in fields:
            # The owner is a config section, such as "model", or another class.
            check_field_name(key, field_names(cls), getattr(cls, "name", cls.__name__))
        return super().__new__(cls)


class ConfigSection(NamedFields):
    """Base class for config sections. Creating a section checks each field's type and rules."""

    name: ClassVar[str]
    """The section's name in a config, such as "model"."""
    _constants: ClassVar[Self | None] = None
    """The section whose numbers `with_numbers` replaced, or None."""

    def __post_init__(self) -> None:
        for key, (field_type, metadata) in annotations(type(self)).items():
            value = getattr(self, key)
            _check_type(f"{self.name}.{key}", field_type, value)
            # A config is stored as UTF-8, which has no code for surrogates.
            texts = value if isinstance(value, tuple) else (value,)
            is_storable = not any(isinstance(x, str) and SURROGATE.search(x) for x in texts)
            self.require(key, is_storable, "UTF-8")
            for rule in metadata:
                if isinstance(rule, Rule) and value is not None:
                    self.require(key, rule.allows(value), rule.words)
                if isinstance(rule, PartName):
                    rule.check(f"{self.name}.{key}", value)

    def change(self, /, **fields: object) -> Self:
        """Return a copy with some fields changed; raise a ConfigError if one does not exist."""
        own = {key: getattr(self, key) for key in field_names(type(self))}
        return type(self)(**{**own, **fields})

    def numbers(self) -> dict[str, float]:
        """Return the numeric settings that a compiled step takes as arguments, keyed by field."""
        return {
            key: value
            for key, (_, marks) in annotations(type(self)).items()
            if (value := getattr(self, key)) is not None
            and (NUMBER in marks or (NUMBER_UNLESS_ZERO in marks and value))
        }

    @property
    def has_foreign_part(self) -> bool:
        """Whether a field selects a part from outside this package."""
        return any(self.is_foreign(key) for key in part_fields(type(self)))

    def with_numbers(self, numbers: Mapping[str, object]) -> Self:
        """Return a copy with different values, such as traced arrays, without checking them."""
        changed = copy.copy(self)
        for key, value in {**numbers, "_constants": self}.items():
            object.__setattr__(changed, key, value)
        return changed

    def for_part(self, key: str) -> Self:
        """Return the section for the part that a field selects.

        A part from outside this package might need Python floats, for example in a condition, so
        it receives the numbers as constants. The program is then specific to the constants that
        the part uses.
        """
        return self._constants or self if self.is_foreign(key) else self

    def is_foreign(self, key: str) -> bool:
        """Return whether a field selects a part that is registered outside this package."""
        return getattr(self, key) in foreign_names(f"{self.name}.{key}")

    def require(self, key: str, is_valid: bool, rule: str) -> None:
        """Unless `is_valid` is true, raise a ConfigError that states the field, rule, and value."""
        if not is_valid:
            raise ConfigError.from_field(f"{self.name}.{key}", rule, getattr(self, key))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar known name, or "" if no name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def advise_import(name: str, known: Iterable[str]) -> str:
    """Return advice for an unknown name of a part: the most similar known name, and an import."""
    how = "f your own file registers it, import that file (on the command line: --import)"
    suggestion = did_you_mean(name, known)
    return f"{suggestion} I{how}" if suggestion else f"; i{how}"


def field_names(cls: type) -> list[str]:
    """Return the names of a section's fields, or of a config's sections."""
    return [f.name for f in dataclasses.fields(cls)]


def check_field_name(name: object, known: list[str], owner: str) -> None:
    """Raise a ConfigError with a suggestion unless `name` is one of the known fields of `owner`."""
    if name not in known:
        raise ConfigError(f"unknown field {name!r} of {owner}{did_you_mean(str(name), known)}")


@functools.cache
def annotations(cls: type) -> dict[str, tuple[TypeForm, tuple[object, ...]]]:
    """Return the type of each dataclass field, and its `Annotated` metadata."""
    plain, full = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    return {key: (plain[key], getattr(full[key], "__metadata__", ())) for key in field_names(cls)}


def marked(cls: type, mark: Mark) -> set[str]:
    """Return the names of a section's fields that have a mark."""
    return {key for key, (_, metadata) in annotations(cls).items() if mark in metadata}


def part_fields(cls: type) -> dict[str, PartName]:
    """Return the rules of the fields that select parts."""
    rules = {key: rules for key, (_, rules) in annotations(cls).items()}
    return {key: rule for key in rules for rule in rules[key] if isinstance(rule, PartName)}


def _check_type(field: str, form: TypeForm, value: object) -> None:
    """Raise a ConfigError if a value does not have the type of its field."""
    if isinstance(value, FIELD_TYPES) and _find_wrong(form, value, field) is None:
        return
    options = typing.get_args(form)
    if typing.get_origin(form) is Literal:
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        raise ConfigError.from_field(field, f"one of {', '.join(map(repr, options))}", value, hint)
    allowed = options if isinstance(form, types.UnionType) else (form,)
    wanted = " or ".join(FIELD_WORDS.get(x) or x.__name__ for x in allowed)
    raise ConfigError.from_field(field, wanted, value)


FIELD_TYPES = (bool, int, float, str, tuple, types.NoneType)
"""The types of the values of config fields."""
FIELD_WORDS: dict[TypeForm, str] = {
    types.NoneType: "None",
    tuple[str, str]: "a pair of strings",
    tuple[str, ...]: "strings",
}
WORDS: dict[TypeForm, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    types.NoneType: "None",
    dict: "a dictionary",
    collections.abc.Callable: "a function",
    typing.SupportsIndex: "an integer",
}
LIST_FORMS = (collections.abc.Sequence, Iterable, collections.abc.Collection)
UNIONS = (types.UnionType, typing.Union)
NOT_LISTS: tuple[type, ...] = (str, bytes, Mapping)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function, so that wrong types and unknown arguments are UsageErrors.

    The items of lists and tuples are checked, but iterators are not consumed. The function itself
    checks strings in lists, shapes of arrays, and arguments that its signature does not name.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def check(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = (x for x in kwargs if x not in signature.parameters)
            hint = "".join(did_you_mean(x, signature.parameters) for x in [*unknown][:1])
            raise UsageError(f"{function.__name__} cannot be called: {error}{hint}") from error
        for key, value in given.items():
            parameter = signature.parameters[key]
            is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if is_named and (found := _find_wrong(parameter.annotation, value, key)):
                place, wrong = found
                is_short = isinstance(wrong, str | bytes | float | int | None)
                shown = repr(wrong) if is_short else f"an object of type {type(wrong).__name__}"
                shown += f" at {place}" if place != key else ""
                raise UsageError(f"{key} must be {_describe(parameter.annotation)}, got {shown}")
        return function(*args, **kwargs)

    return check


def _find_wrong(form: TypeForm, value: object, place: str) -> tuple[str, object] | None:
    """Return the place and value of the innermost item that has a wrong type, or None."""
    origin, options = typing.get_origin(form) or form, typing.get_args(form)
    values = value if isinstance(value, (list, tuple)) else ()
    items: Iterable[tuple[object, TypeForm, object]] = ()
    if origin in UNIONS:
        found = [_find_wrong(option, value, place) for option in options]
        if None in found:
            return None
        return next((x for x in found if x is not None and x[0] != place), (place, value))
    if origin is Literal:
        # The value can be an array.
        is_valid = any(isinstance(value, type(x)) and value == x for x in options)
    elif form in (int, float):
        kind = numbers.Integral if form is int else numbers.Real
        is_valid = isinstance(value, kind) and not isinstance(value, bool)
    elif not isinstance(origin, type) or form is inspect.Parameter.empty:
        is_valid = True
    elif hasattr(origin, "array_type"):
        is_valid = isinstance(value, origin.array_type)
    elif origin in LIST_FORMS or options[1:] == (...,):
        is_valid = isinstance(value, Iterable) and not isinstance(value, NOT_LISTS)
        items = ((i, options[0], x) for i, x in enumerate(values)) if options != (str,) else ()
    elif origin is tuple:
        is_valid = len(values) == len(options)
        items = zip(range(len(values)), options, values, strict=False)
    else:
        is_valid = isinstance(value, origin)
        if origin is Mapping and options and isinstance(value, Mapping):
            pairs = (zip(options, pair, strict=True) for pair in value.items())
            items = ((k, *typed) for k, pair in zip(value, pairs, strict=True) for typed in pair)
    wrong = (_find_wrong(part, item, f"{place}[{key!r}]") for key, part, item in items)
    return next(filter(None, wrong), None if is_valid else (place, value))


def _describe(form: TypeForm) -> str:
    """Return words for the types that an annotation allows."""
    origin, options = typing.get_origin(form) or form, typing.get_args(form)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(_describe, options)))
    if origin is Literal:
        return " or ".join(map(repr, options))
    words = map(_describe, options)
    if origin in LIST_FORMS:
        [item] = words
        is_noun = isinstance(options[0], type) and not typing.get_args(options[0])
        return f"a list of {item.split()[-1]}s" if is_noun else f"a list ({item})"
    if origin is Mapping and options:
        return f"a dictionary ({' and '.join(words)})"
    if origin is tuple:
        return f"a pair ({' and '.join(words)})"
    if hasattr(origin, "array_type"):
        return f"an array of shape ({', '.join(origin.dim_str.split())})"
    return WORDS.get(origin) or f"a {getattr(origin, '__name__', origin)}"
