"""Check the words of a command line, so that every mistake gets a specific one-line message.

A command is a dataclass, and the types of its fields define its options. tyro converts the values
only after these checks, because it reports a mistake in a box of several lines.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from transformer_jax.config import Config
from transformer_jax.config.validation import closest, did_you_mean, field_names
from transformer_jax.errors import UsageError

# A negative number is a value, not an option.
OPTION = re.compile(r"--?[A-Za-z]")
DESCRIPTIONS: Mapping[object, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    types.NoneType: "None",
}
CONFIG_OPTIONS = tuple(f"--{section}." for section in field_names(Config))


@dataclass(frozen=True)
class Words:
    """The words after the name of a command: positional arguments, and options with values."""

    positional: list[str]
    options: list[tuple[str, list[str]]]

    def as_list(self) -> list[str]:
        """Return the words in a form that does not confuse negative numbers with options."""
        words = list(self.positional)
        for name, values in self.options:
            is_negative = len(values) == 1 and values[0].startswith("-")
            words += [f"{name}={values[0]}"] if is_negative else [name, *values]
        return words

    def split_config_options(self) -> tuple["Words", "Words"]:
        """Return the words of the command itself, and the options that change config fields."""
        own = [option for option in self.options if not option[0].startswith(CONFIG_OPTIONS)]
        of_config = [option for option in self.options if option[0].startswith(CONFIG_OPTIONS)]
        return Words(self.positional, own), Words([], of_config)


def split_words(words: Sequence[str], command: type) -> Words:
    """Split the words of a command into positional arguments and options, and check the options.

    Args:
        words: the words after the command's name, without `--help`.
        command: the dataclass of the command.

    Raises:
        UsageError: an option does not exist, or its arguments are not valid for its type.
    """
    options = option_types(command)
    split = Words([], [])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not OPTION.match(word):
            split.positional.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in options:
            raise UsageError(f"unknown option {word}{_did_you_mean_option(name, options)}")
        values = [value] if equals else []
        while rest and not OPTION.match(rest[0]) and len(values) < _max_words(options[name]):
            values.append(rest.pop(0))
        _check_value(name, options[name], values)
        split.options.append((name, values))
    return split


def option_types(command: type, prefix: str = "--") -> dict[str, Any]:
    """Return the type of each option of a command; a flag has no value, so its type is None."""
    options: dict[str, Any] = {}
    for key, (plain, metadata) in _annotations(command).items():
        option = key.replace("_", "-")
        if Positional in metadata:
            continue
        if dataclasses.is_dataclass(plain):
            options |= option_types(plain, prefix if plain is Config else f"{prefix}{option}.")
        elif plain is bool:
            options[f"{prefix}{option}"] = None
            if FlagCreatePairsOff not in metadata:
                options[f"{prefix}no-{option}"] = None
        else:
            aliases = [a for m in metadata for a in getattr(m, "aliases", None) or ()]
            options |= dict.fromkeys((f"{prefix}{option}", *aliases), plain)
    return options


def check_positional(name: str, command: type, argument_name: str, words: Sequence[str]) -> None:
    """Check the number of a command's positional arguments.

    Args:
        name: the name of the command.
        command: the dataclass of the command.
        argument_name: a description of the arguments, such as "a config".
        words: the arguments.

    Raises:
        UsageError: there are too few or too many of them.
    """
    positional = [pair for pair in _annotations(command).values() if Positional in pair[1]]
    if len(words) < len(positional):
        metavars = [getattr(m, "metavar", None) for _, metadata in positional for m in metadata]
        usage = " ".join(filter(None, (name, *metavars, "[OPTIONS]")))
        raise UsageError(f"{name} begins with {argument_name}: transformer-jax {usage}")
    limit = sum(_max_words(plain) for plain, _ in positional)
    if len(words) > limit:
        raise UsageError(f"{name} got an unexpected argument {words[int(limit)]!r}")


def _annotations(kind: type) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """Return the type and the metadata of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    annotations: dict[str, tuple[Any, tuple[object, ...]]] = {}
    for key in field_names(kind):
        is_annotated = typing.get_origin(hints[key]) is typing.Annotated
        plain, *metadata = typing.get_args(hints[key]) if is_annotated else (hints[key],)
        annotations[key] = plain, tuple(metadata)
    return annotations


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _max_words(kind: Any) -> float:
    """Return the maximum number of words in a value of this type."""
    if kind is None:
        return 0
    for plain in _alternatives(kind):
        if typing.get_origin(plain) is tuple:
            items = typing.get_args(plain)
            return math.inf if Ellipsis in items else len(items)
    return 1


def _did_you_mean_option(name: str, options: Iterable[str]) -> str:
    """Suggest the option with an added section or `-from` if it exists, or else the closest one."""
    completed = [o for o in options if o == f"{name}-from" or o.endswith(f".{name.lstrip('-')}")]
    option = completed[0] if completed else closest(name, options)
    return f"; did you mean {option}?" if option else ""


def _check_value(option: str, kind: Any, words: Sequence[str]) -> None:
    """Check that the words after an option are a value of its type.

    Raises:
        UsageError: the words are not a value of this type.
    """
    if _max_words(kind) == math.inf:
        return
    if kind is None:
        if words:
            raise UsageError(f"{option} takes no value, got {words[0]!r}")
        return
    if not words:
        raise UsageError(f"{option} needs a value")
    alternatives = _alternatives(kind)
    if not any(_is_value(plain, words) for plain in alternatives):
        described = " or ".join(_describe(plain) for plain in alternatives)
        choices = [c for plain in alternatives for c in _choices(plain)]
        hint = did_you_mean(words[0], choices)
        raise UsageError(f"{option} must be {described}, got {' '.join(words)!r}{hint}")


def _choices(plain: Any) -> tuple[str, ...]:
    return typing.get_args(plain) if typing.get_origin(plain) is Literal else ()


def _describe(plain: Any) -> str:
    """Return a description of the values of a type that is not a union."""
    if choices := _choices(plain):
        return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    return DESCRIPTIONS.get(plain, "two strings")


def _is_value(plain: Any, words: Sequence[str]) -> bool:
    """Return whether the words are a value of a type that is not a union."""
    if plain is types.NoneType:
        return list(words) == ["None"]
    if choices := _choices(plain):
        return words[0] in choices
    if plain in (int, float):
        try:
            plain(words[0])
        except ValueError:
            return False
    return len(words) == _max_words(plain)
