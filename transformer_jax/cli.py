"""Run `transformer-jax COMMAND ...`, and report any error with one line and an exit code."""

import contextlib
import dataclasses
import importlib.metadata
import io
import re
import sys
from collections.abc import Sequence
from types import MappingProxyType, NoneType
from typing import Annotated, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from transformer_jax.commands import COMMANDS
from transformer_jax.commands.arguments import Words, check_positional, split_words
from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.commands.training import TrainingCommand
from transformer_jax.config import Config, Row
from transformer_jax.config.validation import TypeForm, annotations, did_you_mean
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import UsageError

T = TypeVar("T")
HELP = {"-h", "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Print any error as one line."""
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
    words = split_words([word for word in rest if word not in HELP], kind)
    if not HELP.isdisjoint(rest):
        _print_help(name, kind, words)
    check_positional(name, kind, kind.argument_name, words.positional)
    if issubclass(kind, PathCommand):
        _create(kind, words.own).run()
    else:
        _run_config_command(kind, words, arguments)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    summaries = ((name, (kind.__doc__ or "").splitlines()[0]) for name, kind in COMMANDS.items())
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in summaries)
    end = "transformer-jax COMMAND --help lists the options of a command."
    return f"usage: transformer-jax COMMAND ...\n\n{commands}\n\n{end}"


def _print_help(name: str, kind: type[ConfigCommand] | type[PathCommand], words: Words) -> NoReturn:
    """Print a command's help. If a config is given, show its values as the defaults."""
    default = tyro.MISSING_NONPROP
    if words.positional and issubclass(kind, ConfigCommand):
        command = _create(kind, words.own)
        config = next(iter(command.load_rows().values())).config
        default = dataclasses.replace(command, config=config)
    _join_lines(kind)
    _hide_none(kind)
    tyro.cli(kind, prog=f"transformer-jax {name}", args=["--help"], default=default)
    raise SystemExit


def _join_lines(kind: type) -> None:
    """Let tyro wrap the help of each option. By default, it keeps the line breaks of docstrings."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for parent in reversed(kind.__mro__[:-1]):
        for option in docstring_parser.parse_from_object(parent).params:
            if field := fields.get(option.arg_name):
                text = re.sub(r"(?<=\S)\n *(?=\S)", " ", option.description or "")
                field.metadata = MappingProxyType({"help": text})
    for section in filter(dataclasses.is_dataclass, get_type_hints(kind).values()):
        _join_lines(section)


def _hide_none(kind: type) -> None:
    """Let tyro omit defaults of None and (), because each option's text describes their effect."""
    types = annotations(kind)
    for field in dataclasses.fields(kind):
        if field.default in (None, ()):
            option_type, metadata = types[field.name]
            hidden = tyro.conf.arg(help_behavior_hint="", metavar=_metavar(option_type))
            kind.__annotations__[field.name] = Annotated[option_type, hidden, *metadata]


def _metavar(option_type: TypeForm) -> str | None:
    """Return the placeholder for a type in a union with None, or None to keep tyro's."""
    match [kind for kind in get_args(option_type) if kind is not NoneType]:
        case [type() as kind]:
            return kind.__name__.upper()
        case [kind] if get_origin(kind) is Literal:
            return f"{{{','.join(get_args(kind))}}}"
    return None


def _run_config_command(kind: type[ConfigCommand], words: Words, arguments: Sequence[str]) -> None:
    """Load the command's configs, apply the options to them, and run the command."""
    command = _create(kind, words.own)
    rows = {
        name: Row(_create(Config, words.of_config, row.config), row.paper)
        for name, row in command.load_rows().items()
    }
    if isinstance(command, TrainingCommand):
        command.check_timeouts()
        # The supervisor runs this command in a child process, where `heartbeat.connect` is true.
        if command.supervise and not heartbeat.connect():
            sys.exit(command.under_supervisor(arguments))
    for name, row in rows.items():
        for warning in row.config.warnings():
            stderr.print(f"{name}: {warning}" if name else warning)
    dataclasses.replace(command, arguments=tuple(arguments)).run(rows)


def _create(kind: type[T], words: Sequence[str], default: T | None = None) -> T:
    """Create a command or config from words that `split_words` has already checked."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                kind,
                args=words,
                console_outputs=False,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as end:
        raise UsageError(f"invalid arguments: {' '.join(words)}") from end
