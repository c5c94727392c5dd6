"""Help texts and shell completion, which tyro generates from the fields of the commands."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from types import MappingProxyType, NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.conf import Positional, Suppress

from transformer_jax.commands.arguments import list_options, make_default, parse, unchecked
from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.config import Config
from transformer_jax.config.loading import shipped_configs
from transformer_jax.config.validation import TypeForm, annotations
from transformer_jax.console import stdout
from transformer_jax.errors import UsageError

Command = type[ConfigCommand] | type[PathCommand]
# tyro completes commands and options. Complete other words with the names of shipped configs if the
# command expects a config, and with file names otherwise. The other shells run this script, too:
# tyro's own script for zsh does not complete values, and its command line for fish is too long for
# Linux.
BASH = """
_transformer_jax() {{
  local word
  local -a found
  _tyro_transformer_jax
  found=()
  for word in "${{COMPREPLY[@]}}"; do [[ "$word" == *" "* || -z "$word" ]] || found+=("$word"); done
  if [[ -z "${{found[*]}}" || "$COMP_CWORD" == 2 ]]; then
    case "${{COMP_WORDS[1]}}" in
      {commands}) found+=($(compgen -W "{configs}" -- "${{COMP_WORDS[COMP_CWORD]}}")) ;;
    esac
  fi
  COMPREPLY=("${{found[@]}}")
}}
complete -o default -F _transformer_jax transformer-jax
"""
SHELLS = {
    "bash": "{script}",
    "zsh": "(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}\n"
    "autoload -Uz bashcompinit && bashcompinit\n{script}",
    "fish": """
function _transformer_jax
  set -l words (commandline -opc) (commandline -ct)
  printf '%s\\n' {quoted} '
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _transformer_jax
    printf "%s\\n" "${{COMPREPLY[@]}}"' | bash -s -- $words | string match -v ""
end
complete -c transformer-jax -a "(_transformer_jax)"
""",
}


def restore_docstrings(commands: Mapping[str, Command]) -> None:
    """Read the commands' docstrings from their source if Python removed them (`python -OO`)."""
    for command_type in commands.values() if sys.flags.optimize > 1 else ():
        [definition] = ast.parse(inspect.getsource(command_type)).body
        if isinstance(definition, ast.ClassDef):
            command_type.__doc__ = ast.get_docstring(definition)


def print_help(name: str, command_type: Command, words: Sequence[str], *, everything: bool) -> None:
    """Print a command's help. If a config is given, show its values as the defaults."""
    _join_lines(command_type)
    default, shown = make_default(command_type), None
    end = "\n--import FILE executes a Python file that registers parts; repeat it for other files"
    if issubclass(command_type, ConfigCommand):
        if words:
            default = parse(name, command_type, words)
            config = next(iter(default.load_rows().values())).config
            default = dataclasses.replace(default, config=config)
        end += f"\nshipped configs: {', '.join(_shipped_names())}"
        if command_type.common and not everything:
            shown = command_type.common
            count = sum(1 for _ in list_options(command_type))
            end += (
                f"\nexample: transformer-jax {command_type.example}" if command_type.example else ""
            )
            end += f"\nall {count} options: transformer-jax {name} --help-all"
    help_type = _adapt(command_type, shown)
    if default is not tyro.MISSING_NONPROP:
        default = _convert(default, help_type)
    text = io.TextIOWrapper(io.BytesIO(), stdout.encoding)
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(
            help_type,
            prog=f"transformer-jax {name}",
            description=inspect.getdoc(command_type),
            args=["--help"],
            default=default,
        )
    # The console escapes control characters, which may occur in a run's config.
    text.seek(0)
    stdout.print(f"{text.read()}{end}".rstrip())


def completion_script(shells: Sequence[str], commands: Mapping[str, Command]) -> str:
    """Return a shell script that completes commands, options, and the names of shipped configs."""
    available = f"(available: {', '.join(SHELLS)})"
    if len(shells) != 1:
        raise UsageError(f"completion needs one shell, such as bash {available}")
    if shells[0] not in SHELLS:
        raise UsageError(f"no completion for {shells[0]!r} {available}")
    types: dict[str, Callable[..., object]] = {}
    for name, command_type in commands.items():
        _join_lines(command_type)
        types[name] = _offer_configs(command_type)
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            types, prog="transformer-jax", args=["--tyro-print-completion", "bash"]
        )
    own = BASH.format(
        commands="|".join(
            name for name, kind in commands.items() if "config" in kind.argument_name
        ),
        configs=" ".join(_shipped_names()),
    )
    text = script.getvalue() + own
    quoted = text.replace("\\", r"\\").replace("'", r"\'")
    return SHELLS[shells[0]].format(script=text, quoted=f"'{quoted}'")


def _offer_configs(cls: type) -> type:
    """Return a subclass whose options accept only shipped configs where a config is expected."""
    choice = tyro.extras.literal_type_from_choices(_shipped_names()) | None
    fields = [
        (key, Annotated[choice, *metadata], field(default=None))
        for key, (form, metadata) in annotations(cls).items()
        if form == str | None and any(getattr(m, "metavar", "") == "CONFIG" for m in metadata)
    ]
    return make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True)


def _shipped_names() -> list[str]:
    return sorted(file.stem for file in shipped_configs().glob("[a-z]*.py"))


def _adapt(cls: type, shown: Sequence[str] | None, prefix: str = "") -> type:
    """Return a subclass with readable placeholders and defaults, and only the `shown` options."""
    forms: dict[str, TypeForm] = {}
    for key, (form, metadata) in annotations(cls).items():
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(form):
            inner = _adapt(form, shown, "" if form is Config else f"{name}.")
            forms[key] = Annotated[inner, None, *metadata]
            continue
        hidden = shown is not None and name not in shown and Positional not in metadata
        hint = tyro.conf.arg(help_behavior_hint=_describe_default, metavar=_metavar(form))
        forms[key] = Annotated[form, hint, *metadata, Suppress if hidden else None]
    names = {"__annotations__": forms, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), names)


def _convert(value: object, cls: type) -> object:
    """Return an instance, with the same values, of a class that `_adapt` created."""
    fields = {
        key: _convert(getattr(value, key), form)
        if dataclasses.is_dataclass(form)
        else getattr(value, key)
        for key, (form, _) in annotations(cls).items()
    }
    return unchecked(cls, **fields)


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


def _metavar(form: TypeForm) -> str | None:
    """Return the placeholder for an option of type `X | None`, or None to keep tyro's default."""
    match [alternative for alternative in get_args(form) if alternative is not NoneType]:
        case [alternative] if get_origin(alternative) is Literal:
            return f"{{{','.join(get_args(alternative))}}}"
        case [alternative] if NoneType in get_args(form):
            kinds = get_args(alternative) or [alternative]
            return " ".join(kind.__name__.upper() for kind in kinds)
    return None


def _describe_default(default: str) -> str:
    """Hide the defaults None and (), because the help texts describe their effect."""
    return "" if default in ("", "None") else f"(default: {default})"
