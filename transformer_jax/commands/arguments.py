"""Check command-line arguments, so that every mistake produces a specific one-line message.

A command is a dataclass, and the names and types of its fields define its options. The checks run
before tyro parses the options, because tyro prints its error messages as multi-line boxes.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tyro.conf import FlagCreatePairsOff, Positional

from transformer_jax.config import Config
from transformer_jax.config.validation import (
    TypeForm,
    annotations,
    closest,
    did_you_mean,
    field_names,
)
from transformer_jax.errors import UsageError

# A negative number is a value, not an option.
OPTION = re.compile(r"--?[A-Za-z]")
CONFIG_OPTIONS = tuple(f"--{section}." for section in field_names(Config))
DESCRIPTIONS: Mapping[object, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    types.NoneType: "None",
}
# The types that an option's value can have: one type, or all members of a union. The tuple is empty
# for a flag, which has no value.
Alternatives = tuple[TypeForm, ...]


class Words(NamedTuple):
    """The words that follow a command's name on the command line."""

    positional: list[str]
    own: list[str]
    """The positional arguments, followed by all options outside `of_config` and their values."""
    of_config: list[str]
    """The options that change config fields, with their values."""


def split_words(words: Sequence[str], command: type) -> Words:
    """Classify the words after a command's name, and check the options and their values.

    Raises:
        UsageError: an option does not exist, or its value is missing or invalid.
    """
    options = option_types(command)
    positional, own, of_config, rest = list[str](), list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if not OPTION.match(word):
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in options:
            raise UsageError(f"unknown option {word}{_did_you_mean_option(name, options)}")
        values = [value] if equals else []
        while rest and not OPTION.match(rest[0]) and len(values) < _max_words(options[name]):
            values.append(rest.pop(0))
        _check_value(name, options[name], values)
        # A value that starts with a dash, as in --out=-x, must stay attached to its option.
        starts_with_dash = len(values) == 1 and values[0].startswith("-")
        option = [f"{name}={values[0]}"] if starts_with_dash else [name, *values]
        (of_config if name.startswith(CONFIG_OPTIONS) else own).extend(option)
    return Words(positional, [*positional, *own], of_config)


def option_types(command: type, prefix: str = "--") -> dict[str, Alternatives]:
    """Map each option to the types that its value can have, or to an empty tuple for a flag."""
    options: dict[str, Alternatives] = {}
    for key, (form, metadata) in annotations(command).items():
        name = key.replace("_", "-")
        if Positional in metadata:
            continue
        if dataclasses.is_dataclass(form):
            options |= option_types(form, prefix if form is Config else f"{prefix}{name}.")
        elif form is bool:
            options[f"{prefix}{name}"] = ()
            if FlagCreatePairsOff not in metadata:
                options[f"{prefix}no-{name}"] = ()
        else:
            aliases = [a for m in metadata for a in getattr(m, "aliases", None) or ()]
            options |= dict.fromkeys((f"{prefix}{name}", *aliases), _alternatives(form))
    return options


def check_positional(name: str, command: type, argument_name: str, words: Sequence[str]) -> None:
    """Check the number of positional arguments.

    Error messages contain `argument_name`, a phrase such as "a config".

    Raises:
        UsageError: there are too few or too many positional arguments.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    fields = {key: pair for key, pair in annotations(command).items() if Positional in pair[1]}
    positional = list(fields.values())
    # The default value of an optional argument is None.
    required = [pair for key, pair in fields.items() if defaults[key] is not None]
    if len(words) < len(required):
        metavars = [getattr(m, "metavar", None) for _, metadata in positional for m in metadata]
        usage = " ".join(filter(None, (name, *metavars, "[OPTIONS]")))
        raise UsageError(f"{name} needs {argument_name}: transformer-jax {usage}")
    limit = sum(_max_words(_alternatives(form)) for form, _ in positional)
    if len(words) > limit:
        raise UsageError(f"{name} got an unexpected argument {words[int(limit)]!r}")


def _alternatives(form: TypeForm) -> Alternatives:
    is_union = typing.get_origin(form) in (typing.Union, types.UnionType)
    return typing.get_args(form) if is_union else (form,)


def _max_words(alternatives: Alternatives) -> float:
    """Return the maximum number of words in the value of an option with these types."""
    tuples = [typing.get_args(form) for form in alternatives if typing.get_origin(form) is tuple]
    if any(Ellipsis in items for items in tuples):
        return math.inf
    return max(map(len, tuples), default=1 if alternatives else 0)


def _did_you_mean_option(name: str, options: Iterable[str]) -> str:
    """Suggest the option that is most similar to `name`, or return "" if no option is similar.

    Prefer an option that adds a section prefix or the suffix `-from` to `name`.
    """
    completed = [o for o in options if o == f"{name}-from" or o.endswith(f".{name.lstrip('-')}")]
    option = completed[0] if completed else closest(name, options)
    return f"; did you mean {option}?" if option else ""


def _check_value(option: str, alternatives: Alternatives, words: Sequence[str]) -> None:
    if not alternatives and words:
        raise UsageError(f"{option} takes no value, got {words[0]!r}")
    if not alternatives:
        return
    if not words:
        raise UsageError(f"{option} needs a value")
    if _max_words(alternatives) == math.inf:
        [form] = alternatives
        for word in words:
            _check_value(option, typing.get_args(form)[:1], [word])
        return
    if not any(_is_value(form, words) for form in alternatives):
        described = " or ".join(map(_describe, alternatives))
        literals = [form for form in alternatives if typing.get_origin(form) is Literal]
        hint = did_you_mean(words[0], [c for form in literals for c in typing.get_args(form)])
        raise UsageError(f"{option} must be {described}, got {' '.join(words)!r}{hint}")


def _is_value(form: TypeForm, words: Sequence[str]) -> bool:
    if form is types.NoneType:
        return list(words) == ["None"]
    if typing.get_origin(form) is Literal:
        return words[0] in typing.get_args(form)
    if form in (int, float):
        try:
            form(words[0])
        except ValueError:
            return False
    return len(words) == _max_words((form,))


def _describe(form: TypeForm) -> str:
    if typing.get_origin(form) is Literal:
        choices = typing.get_args(form)
        return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    return DESCRIPTIONS.get(form, "two strings")
