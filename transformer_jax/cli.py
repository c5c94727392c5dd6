"""The command line `transformer-jax COMMAND ...`: every mistake is one line and an exit code.

This module checks the names and values of options against the types of a command's fields, so
that the message for a mistake is specific and suggests a correction. tyro then creates the
command and its `--help`.
"""

import dataclasses
import importlib.metadata
import re
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from transformer_jax.commands import COMMANDS
from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.commands.training import TrainingCommand
from transformer_jax.config import Config, Row
from transformer_jax.config.validation import closest, did_you_mean, field_names
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import UsageError

T = TypeVar("T")
HELP = {"-h", "--help"}
# A negative number is a value.
OPTION = re.compile(r"--?[A-Za-z]")
CONFIG_OPTIONS = tuple(f"--{section}." for section in field_names(Config))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; print an error as one line."""
    return run_and_report(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in HELP:
        stdout.print(_usage())
        return
    if arguments == ["--version"]:
        stdout.print(importlib.metadata.version("transformer-jax"))
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(
            f"no command {name!r}{did_you_mean(name, COMMANDS)} (there are {', '.join(COMMANDS)})"
        )
    kind = COMMANDS[name]
    words = _split([word for word in rest if word not in HELP], _options(kind))
    needs_help = not HELP.isdisjoint(rest)
    if needs_help and not words.positional:
        _parse(kind, ["--help"], name)
    _check_positional(name, words.positional)
    if issubclass(kind, PathCommand):
        _parse(kind, ["--help"] if needs_help else words.shell_words, name).run()
        return
    own, of_config = words.split_config_options()
    command = _parse(kind, own.shell_words, name)
    rows = command.load_rows()
    if needs_help:
        # The defaults in the help are the values of the config.
        config = next(iter(rows.values())).config
        _parse(kind, ["--help"], name, dataclasses.replace(command, config=config))
    rows = {
        key: Row(_parse(Config, of_config.shell_words, name, row.config), row.paper)
        for key, row in rows.items()
    }
    _run_config_command(command, rows, arguments)


def _run_config_command(
    command: ConfigCommand, rows: dict[str, Row], arguments: Sequence[str]
) -> None:
    for key, row in rows.items():
        for warning in row.config.warnings():
            stderr.print(f"{key}: {warning}" if key else warning)
    # The supervisor starts the same command again; there, the heartbeat connects.
    if isinstance(command, TrainingCommand) and command.supervise and not heartbeat.connect():
        sys.exit(command.under_supervisor(arguments))
    config = next(iter(rows.values())).config
    dataclasses.replace(command, config=config).run(rows)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(
        f"  {name:{width}}  {(command.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    )
    return (
        f"usage: transformer-jax COMMAND ...\n\n{commands}\n\n"
        f"transformer-jax COMMAND --help lists the options of a command."
    )


def _parse(kind: type[T], words: Sequence[str], name: str, default: T | None = None) -> T:
    """Return the dataclass that tyro creates from the words of a command."""
    if default is not None and not words:
        return default
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    is_help = list(words) == ["--help"]
    prog = f"transformer-jax {name}"
    try:
        return tyro.cli(kind, prog=prog, args=words, console_outputs=is_help, **defaults)
    except SystemExit as end:
        if is_help:
            raise
        # The checks in this module should leave no mistake for tyro to find.
        raise UsageError(f"invalid arguments {' '.join(words)}; see {prog} --help") from end


@dataclass(frozen=True)
class _Words:
    """The words after the name of a command: positional ones, and options with their values."""

    positional: list[str]
    options: list[tuple[str, list[str]]]

    @property
    def shell_words(self) -> list[str]:
        """The words in a form in which no value can be mistaken for an option."""
        words = list(self.positional)
        for name, values in self.options:
            words += [f"{name}={values[0]}"] if len(values) == 1 else [name, *values]
        return words

    def split_config_options(self) -> tuple["_Words", "_Words"]:
        """Return the words without the options that change a field of the config, and those."""
        own = [option for option in self.options if not option[0].startswith(CONFIG_OPTIONS)]
        of_config = [option for option in self.options if option[0].startswith(CONFIG_OPTIONS)]
        return _Words(self.positional, own), _Words([], of_config)


def _split(words: Sequence[str], options: dict[str, Any]) -> _Words:
    """Split the words of a command, and check its options.

    Args:
        words: the words after the command's name, without `--help`.
        options: the type of the value of each option.

    Raises:
        UsageError: an option does not exist, or its values do not have its type.
    """
    split = _Words([], [])
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
        limit = _max_values(options[name])
        while rest and not OPTION.match(rest[0]) and len(values) < limit:
            values.append(rest.pop(0))
        _check_values(name, options[name], values)
        split.options.append((name, values))
    return split


def _did_you_mean_option(name: str, options: Iterable[str]) -> str:
    """Suggest the option that lacks only this prefix or suffix, or else the closest one."""
    completed = [o for o in options if o == f"{name}-from" or o.endswith(f".{name.lstrip('-')}")]
    option = completed[0] if completed else closest(name, options)
    return f"; did you mean {option}?" if option else ""


def _annotations(kind: type) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """Return the type and the metadata of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    annotations: dict[str, tuple[Any, tuple[object, ...]]] = {}
    for key in field_names(kind):
        is_annotated = typing.get_origin(hints[key]) is typing.Annotated
        plain, *metadata = typing.get_args(hints[key]) if is_annotated else (hints[key],)
        annotations[key] = plain, tuple(metadata)
    return annotations


def _options(kind: type, prefix: str = "--") -> dict[str, Any]:
    """Return the type of each option of a command; a flag has no value, so its type is None."""
    options: dict[str, Any] = {}
    for key, (plain, metadata) in _annotations(kind).items():
        name = prefix + key.replace("_", "-")
        if Positional in metadata:
            continue
        if dataclasses.is_dataclass(plain):
            options |= _options(plain, prefix if plain is Config else f"{name}.")
        elif plain is bool:
            options[name] = None
            if FlagCreatePairsOff not in metadata:
                options[f"{prefix}no-{key.replace('_', '-')}"] = None
        else:
            aliases = [a for m in metadata for a in getattr(m, "aliases", None) or ()]
            options |= dict.fromkeys((name, *aliases), plain)
    return options


def _check_positional(name: str, words: Sequence[str]) -> None:
    """Check the number of a command's positional arguments.

    Raises:
        UsageError: there are too few or too many of them.
    """
    positional = [pair for pair in _annotations(COMMANDS[name]).values() if Positional in pair[1]]
    limit = sum(_max_values(plain) for plain, _ in positional)
    if len(words) < len(positional):
        metavars = [getattr(m, "metavar", "") for _, metadata in positional for m in metadata]
        usage = " ".join(filter(None, (name, *metavars, "[OPTIONS]")))
        raise UsageError(
            f"{name} begins with {COMMANDS[name].argument_name}: transformer-jax {usage}"
        )
    if len(words) > limit:
        raise UsageError(f"{name} got an unexpected argument {words[int(limit)]!r}")


def _max_values(kind: Any) -> float:
    """Return how many words a value of this type has at most."""
    if kind is None:
        return 0
    tuples = [typing.get_args(k) for k in _alternatives(kind) if typing.get_origin(k) is tuple]
    if not tuples:
        return 1
    return float("inf") if Ellipsis in tuples[0] else len(tuples[0])


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _check_values(option: str, kind: Any, values: Sequence[str]) -> None:
    """Check that the words after an option are a value of its type.

    Raises:
        UsageError: they are not.
    """
    limit = _max_values(kind)
    if kind is None:
        if values:
            raise UsageError(f"{option} takes no value, got {values[0]!r}")
        return
    if not values and limit != float("inf"):
        raise UsageError(f"{option} needs a value")
    alternatives = _alternatives(kind)
    if types.NoneType in alternatives and list(values) == ["None"]:
        return
    if 1 < limit < float("inf") and len(values) < limit:
        raise UsageError(f"{option} must be two strings, got {' '.join(values)!r}")
    for plain in alternatives:
        choices = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
        if choices and values[0] not in choices:
            raise UsageError(
                f"{option} must be one of {', '.join(choices)}, got {values[0]!r}"
                f"{did_you_mean(values[0], choices)}"
            )
        for number, description in ((int, "an integer"), (float, "a number")):
            if plain is number and not _is_number(number, values[0]):
                or_none = " or None" if types.NoneType in alternatives else ""
                raise UsageError(f"{option} must be {description}{or_none}, got {values[0]!r}")


def _is_number(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
