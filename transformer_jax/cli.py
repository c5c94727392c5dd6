"""The command line: `transformer-jax VERB ...`; every mistake is one line and an exit code."""

import contextlib
import importlib.metadata
import io
import re
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from transformer_jax.commands import COMMANDS
from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.commands.training import TrainingCommand
from transformer_jax.config import Config, Row
from transformer_jax.config.validation import did_you_mean
from transformer_jax.console import run_and_report, stderr, stdout
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. A mistake or a fault is one line."""
    return run_and_report(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        stdout.print(_usage())
        return
    if arguments == ["--version"]:
        stdout.print(importlib.metadata.version("transformer-jax"))
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(
            f"no verb {name!r}{did_you_mean(name, COMMANDS)} (there are {', '.join(COMMANDS)})"
        )
    verb = COMMANDS[name]
    if issubclass(verb, PathCommand) and rest:
        _parse(name, verb, rest).run()
    elif issubclass(verb, ConfigCommand) and rest and not rest[0].startswith("-"):
        begun, rest = verb.parse_configs(rest)
        rows = {
            key: (_parse(name, verb, rest, verb().with_config(row.config)), row.paper)
            for key, row in begun.items()
        }
        first = next(iter(rows.values()))[0]
        # The trainer is the same command again, which finds that it is listened to.
        if isinstance(first, TrainingCommand) and first.supervise and not heartbeat.connect():
            sys.exit(first.under_supervisor(arguments))
        first.run({key: Row(_config(key, row), paper) for key, (row, paper) in rows.items()})
    elif "-h" in rest or "--help" in rest:
        _parse(name, verb, rest)
    else:
        raise UsageError(
            f"{name} begins with {verb.argument_name}: transformer-jax {name} "
            f"{verb.argument_name.split()[-1].upper()} [OPTIONS]"
        )


def _config(key: str, verb: ConfigCommand) -> Config:
    """Return the config that a verb ended up with; tell what is allowed but may not be meant."""
    config = Config(verb.model, verb.data, verb.train, verb.decode)
    for note in config.warnings():
        stderr.print(f"{key}: {note}" if key else note)
    return config


def _parse(name: str, verb: type[Any], arguments: list[str], default: Any = None) -> Any:
    """Let tyro read a verb's arguments; what it says of a mistake becomes one line."""
    said = io.StringIO()
    chosen = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(verb, prog=f"transformer-jax {name}", args=arguments, **chosen)
    except SystemExit as end:
        if end.code == 0:
            raise
        raise UsageError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """Return the message of a box that tyro drew, with the nearest right name."""
    text = re.sub(r"[╭╮╰╯│]|^.*╭─ ", " ", box)
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{3,}", text)]
    _, message, *more = [*filter(None, parts), "", ""]
    advice = " ".join(more)
    if proposed := re.search(r"Perhaps you meant: (--[\w.-]+)", advice):
        return f"{message}; did you mean {proposed[1]}?"
    if choice := re.match(r"invalid choice '(.*)' for argument '(\S+)'.*\((.*)\)", message):
        given, option, choices = choice.groups()
        hint = did_you_mean(given, re.findall(r"'(.*?)'", choices))
        return f"{option} must be one of {choices}, got {given!r}{hint}"
    if value := re.match(r"Error parsing (--\S+): .*?\[?'(.*?)'", message):
        # Of an option with two names, advice has the kind after each: --beam INT, --beam-size INT.
        kind = re.search(rf"{re.escape(value[1].split('/')[0])} (\S+?),?(?:\s|$)", advice)
        wanted = kind[1] if kind else "something else"
        # tyro's way to write a pair, or none.
        wanted = "two strings" if "{STR" in wanted or wanted == "STR" else wanted
        return f"{value[1]} must be {wanted}, got {value[2]!r}"
    return message


def _usage() -> str:
    width = max(map(len, COMMANDS))
    verbs = "\n".join(
        f"  {name:{width}}  {(verb.__doc__ or '').splitlines()[0]}"
        for name, verb in COMMANDS.items()
    )
    return (
        f"usage: transformer-jax VERB ...\n\n{verbs}\n\n"
        f"transformer-jax VERB --help tells the options of a verb."
    )
