"""Run `transformer-jax COMMAND ...`, and report errors as one-line messages with exit codes."""

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
from transformer_jax.config.loading import import_file, import_inherited
from transformer_jax.config.validation import TypeForm, annotations, did_you_mean
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import UsageError

T = TypeVar("T")
HELP = {"-h", "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Print any error as a one-line message."""
    return run_and_report(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in HELP:
        stdout.print(_usage())
        return
    if arguments == ["--version"]:
        stdout.print(importlib.metadata.version("transformer-jax"))
        return
    arguments = _import_files(arguments)
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(
            f"no command {name!r}{did_you_mean(name, COMMANDS)} (available: {', '.join(COMMANDS)})"
        )
    command_type = COMMANDS[name]
    words = split_words([word for word in rest if word not in HELP], command_type)
    if not HELP.isdisjoint(rest):
        _print_help(name, command_type, words)
    check_positional(name, command_type, command_type.argument_name, words.positional)
    if issubclass(command_type, PathCommand):
        _create(command_type, words.own).run()
    else:
        _run_config_command(command_type, words, arguments)


def _import_files(arguments: list[str]) -> list[str]:
    """Import the file of each `--import FILE`, and return the other arguments."""
    import_inherited()
    words, others = list(arguments), list[str]()
    while words:
        option, equals, file = words.pop(0).partition("=")
        if option != "--import":
            others.append(option + equals + file)
        elif equals or words:
            import_file(file if equals else words.pop(0))
        else:
            raise UsageError("--import needs a value")
    return others


def _usage() -> str:
    width = max(map(len, COMMANDS))
    summaries = (
        (name, (command_type.__doc__ or "").splitlines()[0])
        for name, command_type in COMMANDS.items()
    )
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in summaries)
    end = "transformer-jax COMMAND --help lists the options of a command."
    return f"usage: transformer-jax COMMAND ...\n\n{commands}\n\n{end}"


def _print_help(
    name: str, command_type: type[ConfigCommand] | type[PathCommand], words: Words
) -> NoReturn:
    """Print a command's help. If a config is given, show its values as the defaults."""
    default = tyro.MISSING_NONPROP
    if words.positional and issubclass(command_type, ConfigCommand):
        command = _create(command_type, words.own)
        config = next(iter(command.load_rows().values())).config
        default = dataclasses.replace(command, config=config)
    _join_lines(command_type)
    _hide_none(command_type)
    tyro.cli(command_type, prog=f"transformer-jax {name}", args=["--help"], default=default)
    raise SystemExit


def _join_lines(cls: type) -> None:
    """Let tyro wrap each option's help text. By default, tyro keeps the docstring's line breaks."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for parent in reversed(cls.__mro__[:-1]):
        for option in docstring_parser.parse_from_object(parent).params:
            if field := fields.get(option.arg_name):
                text = re.sub(r"(?<=\S)\n *(?=\S)", " ", option.description or "")
                field.metadata = MappingProxyType({"help": text})
    for section in filter(dataclasses.is_dataclass, get_type_hints(cls).values()):
        _join_lines(section)


def _hide_none(cls: type) -> None:
    """Hide the defaults None and () in the help, because the help texts describe their effect."""
    types = annotations(cls)
    for field in dataclasses.fields(cls):
        if field.default in (None, ()):
            option_type, metadata = types[field.name]
            hidden = tyro.conf.arg(help_behavior_hint="", metavar=_metavar(option_type))
            cls.__annotations__[field.name] = Annotated[option_type, hidden, *metadata]


def _metavar(option_type: TypeForm) -> str | None:
    """Return the placeholder for an option of type `X | None`, or None to keep tyro's default."""
    match [alternative for alternative in get_args(option_type) if alternative is not NoneType]:
        case [type() as alternative]:
            return alternative.__name__.upper()
        case [alternative] if get_origin(alternative) is Literal:
            return f"{{{','.join(get_args(alternative))}}}"
    return None


def _run_config_command(
    command_type: type[ConfigCommand], words: Words, arguments: Sequence[str]
) -> None:
    """Load the command's configs, apply the options to them, and run the command."""
    command = _create(command_type, words.own)
    rows = {
        name: Row(_create(Config, words.of_config, row.config), row.paper)
        for name, row in command.load_rows().items()
    }
    if isinstance(command, TrainingCommand):
        command.check_timeouts()
        # The supervisor runs this command in a child process, where `connect` returns True.
        if command.supervise and not heartbeat.connect():
            sys.exit(command.under_supervisor(arguments))
    for name, row in rows.items():
        for warning in row.config.warnings():
            stderr.print(f"{name}: {warning}" if name else warning)
    dataclasses.replace(command, arguments=tuple(arguments)).run(rows)


def _create(cls: type[T], words: Sequence[str], default: T | None = None) -> T:
    """Create a command or config from arguments that `split_words` has already checked."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                cls,
                args=words,
                console_outputs=False,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as end:
        raise UsageError(f"invalid arguments: {' '.join(words)}") from end
