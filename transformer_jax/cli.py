"""Run `transformer-jax COMMAND ...`, and report errors as one-line messages with exit codes."""

import dataclasses
import sys
from collections.abc import Sequence

from transformer_jax.commands import COMMANDS
from transformer_jax.commands.arguments import given_fields, parse
from transformer_jax.commands.base import ConfigCommand
from transformer_jax.commands.help import completion_script, print_help, restore_docstrings
from transformer_jax.commands.training import TrainingCommand
from transformer_jax.config.loading import import_file, import_inherited
from transformer_jax.config.validation import did_you_mean
from transformer_jax.console import hide_late_errors, run_and_report, stderr, stdout, use_utf8
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import UsageError
from transformer_jax.runs.versions import package_version

HELP_OPTIONS = {"-h", "--help", "--help-all"}
HELP = {"help", *HELP_OPTIONS}
VERSION = {"version", "-v", "--version"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Print any error as a one-line message."""
    if arguments is None:
        use_utf8()
        hide_late_errors()
    return run_and_report(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(arguments: list[str]) -> None:
    arguments = _import_files(arguments)
    restore_docstrings(COMMANDS)
    words = [word for word in arguments if word not in HELP]
    if not words or (words[0] == "completion" and words != arguments):
        stdout.print(_usage())
        return
    if arguments[0] in HELP:
        option = "--help-all" if "--help-all" in arguments else "--help"
        arguments = [words[0], option]
    name, *rest = arguments
    if name in VERSION:
        stdout.print(package_version())
        return
    if name == "completion":
        stdout.print(completion_script(rest, COMMANDS))
        return
    if name not in COMMANDS:
        names = (*COMMANDS, "completion", "help", "version")
        raise UsageError(
            f"unknown command {name!r}{did_you_mean(name, names)} (available: {', '.join(names)})"
        )
    command_type = COMMANDS[name]
    words = [word for word in rest if word not in HELP_OPTIONS]
    if words != rest:
        print_help(name, command_type, words, everything="--help-all" in rest)
        return
    command = parse(name, command_type, words)
    if isinstance(command, ConfigCommand):
        _run_config_command(command, words, arguments)
    else:
        command.run()


def _import_files(arguments: list[str]) -> list[str]:
    """Import the file in each `--import FILE` option, and return the remaining arguments."""
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
    return (
        f"usage: transformer-jax COMMAND ...\n\n{commands}\n\n"
        "transformer-jax COMMAND --help shows a command's main options, and --help-all shows all "
        "options.\n--import FILE, which every command accepts, executes a Python file that "
        "registers parts.\ntransformer-jax completion {bash,zsh,fish} prints a script for a shell."
    )


def _run_config_command(
    command: ConfigCommand, words: Sequence[str], arguments: Sequence[str]
) -> None:
    """Load the command's configs, apply the options to them, and run the command."""
    changes = given_fields(command.config, words)
    loaded = command.load_rows()
    rows = {
        name: dataclasses.replace(row, config=row.config.change(**changes))
        for name, row in loaded.items()
    }
    if isinstance(command, TrainingCommand):
        command.check_timeouts()
        # The supervisor runs this command in a child process, where `connect` returns True.
        if command.supervise and not heartbeat.connect():
            sys.exit(command.under_supervisor(arguments))
    for name, row in command.select(rows, loaded).items():
        for warning in row.config.warnings():
            stderr.print(f"{name}: {warning}" if name else warning)
    dataclasses.replace(command, arguments=tuple(arguments)).run(rows)
