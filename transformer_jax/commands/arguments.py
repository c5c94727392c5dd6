"""Parse a command's arguments with tyro, and report each mistake in one line.

A command is a dataclass, and the names and types of its fields define its options. The programs in
`experiments/` are functions or dataclasses. By default, tyro prints its error messages as
multi-line boxes.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, get_args, get_type_hints

import tyro
from tyro import _errors as tyro_errors
from tyro.conf import FlagCreatePairsOff, Positional, Suppress

from transformer_jax.config import Config
from transformer_jax.config.validation import TypeForm, annotations, did_you_mean
from transformer_jax.errors import ConfigError, UsageError
from transformer_jax.files import expand_path
from transformer_jax.remote.copies import local_path

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition

T = TypeVar("T")
WORDS = {
    "INT": "an integer",
    "FLOAT": "a number",
    "[INT [INT ...]]": "integers",
    "[FLOAT [FLOAT ...]]": "numbers",
    "STR STR": "two strings",
    "PATH PATH": "two paths",
}
# The placeholders of options that contain paths. Some of the paths can be URLs of buckets.
PLACEHOLDER = re.compile("RUN|SWEEP|CONFIG")
REMOTE = re.compile("RUN|SWEEP")
# A word such as model.d_k=8, which other programs accept.
ASSIGNMENT = re.compile(r"(?:model|data|train|decode)\.\w+=.*")


def parse(name: str, command_type: type[T], words: Sequence[str]) -> T:
    """Create a command from the words that follow its name. Config fields are not checked yet."""
    fields = annotations(command_type)
    own = [word for before, word in zip(["", *words], words, strict=False) if before != "--grid"]
    for word in filter(ASSIGNMENT.fullmatch, own if "config" in fields else ()):
        option, _, value = word.partition("=")
        raise UsageError(f"unexpected argument {word!r}: write {as_option(option)} {value}")
    default = make_default(command_type)
    options = list(list_options(command_type))
    hook = partial(
        _report,
        name=name,
        words=words,
        options=options,
        missing=lambda _: _missing(name, command_type),
    )
    with tyro_errors.on_parse_error(hook):
        command = tyro.cli(command_type, args=words, prog=name, default=default)
    paths = {
        key: _expand(getattr(command, key), is_remote=_has_placeholder(REMOTE, pair[1]))
        for key, pair in fields.items()
        if _is_path(*pair)
    }
    for key, value in paths.items():
        # A command is frozen, so set its fields as its `__init__` method does.
        object.__setattr__(command, key, value)
    for key, (_, metadata) in fields.items():
        if Positional in metadata and getattr(command, key) in ("", ()):
            if getattr(command_type, key, ()) is None:
                raise UsageError(f"{key.upper()} needs a value")
            raise _missing(name, command_type)
        option = as_option(key)
        if getattr(command, key) == () and option in given_options(words):
            raise UsageError(f"{option} needs a value")
        # In a script, a variable may be empty, and an empty path would mean the working directory.
        given = zip((x.replace("_", "-") for x in words), [*words[1:], None], strict=False)
        if key in paths and any(x == f"{option}=" or (x, y) == (option, "") for x, y in given):
            raise UsageError(f"{option} needs a value")
    return command


def parse_program(
    prog: str,
    target: Callable[..., T] | Mapping[str, Callable[..., T]],
    words: Sequence[str] | None = None,
) -> T:
    """Call a function, or create a dataclass, with a program's arguments (default: `sys.argv`).

    Args:
        prog: The words that start the program, such as `python -m experiments.positions`.
        target: The function or dataclass, or a mapping whose keys are the names of subcommands.
        words: The arguments.

    Raises:
        UsageError: The arguments are invalid.
    """
    words = sys.argv[1:] if words is None else words
    if isinstance(target, Mapping):
        if words and words[0] in target:
            return parse_program(f"{prog} {words[0]}", target[words[0]], words[1:])
        if not words or words[0] not in ("-h", "--help"):
            got = f", got {words[0]!r}{did_you_mean(words[0], list(target))}" if words else ""
            raise UsageError(f"{prog} needs one of {', '.join(target)}{got}")
        return tyro.extras.subcommand_cli_from_dict(dict(target), prog=prog, args=words)
    options = list(_program_options(target))
    missing = partial(_missing_in_program, prog)
    hook = partial(_report, name=prog, words=words, options=options, missing=missing)
    with tyro_errors.on_parse_error(hook):
        return tyro.cli(target, prog=prog, args=words)


def _program_options(target: Callable[..., object]) -> Iterator[str]:
    hints = get_type_hints(target, include_extras=True)
    for key in inspect.signature(target).parameters:
        metadata = getattr(hints[key], "__metadata__", ())
        if Positional not in metadata and Suppress not in metadata:
            names = (getattr(item, "name", None) for item in metadata)
            yield as_option(next(filter(None, names), key))


def _missing_in_program(prog: str, event: tyro_errors.MissingArgs) -> UsageError:
    names = ", ".join(missing.arg.display_name() for missing in event.missing_arguments)
    return UsageError(f"{prog} needs {names}; see {prog} --help")


def _is_path(form: TypeForm, metadata: Sequence[object]) -> bool:
    """Return whether an option contains one or more paths, or configs, which can be paths."""
    is_folder = _has_placeholder(PLACEHOLDER, metadata)
    return is_folder or Path in (form, *get_args(form)) or Path in get_args((*get_args(form), 0)[0])


def _has_placeholder(pattern: re.Pattern[str], metadata: Sequence[object]) -> bool:
    return any(pattern.search(str(getattr(m, "metavar", ""))) for m in metadata)


def _expand(value: object, *, is_remote: bool) -> object:
    """Expand each path in the value of an option, which may be a bucket's URL."""
    match value:
        case str() | Path():
            path = local_path(value) if is_remote and value != "" else expand_path(str(value))
            return type(value)(path) if isinstance(value, str) else Path(path)
        case tuple():
            return tuple(_expand(item, is_remote=is_remote) for item in value)
    return value


def make_default(command_type: type[T]) -> T:
    """Return a default command, whose config accepts every combination of values."""
    if "config" not in annotations(command_type):
        return tyro.MISSING_NONPROP
    sections = {key: unchecked(form) for key, (form, _) in annotations(Config).items()}
    make: Callable[..., T] = command_type
    return make(config=unchecked(Config, **sections))


def as_option(field: str) -> str:
    """Return the option for a field, such as `--model.d-ff` for "model.d_ff"."""
    return f"--{field.replace('_', '-')}"


@contextlib.contextmanager
def name_options(**names: str) -> Iterator[None]:
    """Let an error about an invalid search or sampling setting name the option that sets it.

    `names` maps the fields whose options have other names to the names of these options.
    """
    try:
        yield
    except ConfigError as error:
        section, _, rest = str(error).partition(".")
        field, _, problem = rest.partition(" ")
        if section not in ("decode", "sampling"):
            raise
        raise ConfigError(f"{as_option(names.get(field, field))} {problem}") from error


def given_options(words: Sequence[str]) -> set[str]:
    """Return the options among the words, without their values."""
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {option.replace("_", "-") for option in options}


def given_fields(config: Config, words: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the values of the config fields that the words contain, keyed by section."""
    given = {option.replace(".no-", ".") for option in given_options(words)}
    return {
        section: {
            key: getattr(getattr(config, section), key)
            for key in annotations(form)
            if as_option(f"{section}.{key}") in given
        }
        for section, (form, _) in annotations(Config).items()
    }


def unchecked(cls: type, **fields: object) -> object:
    """Return an instance of a subclass that accepts every combination of values."""
    return type(cls.__name__, (cls,), {"__post_init__": lambda _: None})(**fields)


def list_options(command_type: type, prefix: str = "") -> Iterator[str]:
    """Yield the name of each option, such as `--model.num-heads`."""
    for key, (form, metadata) in annotations(command_type).items():
        if Positional in metadata or Suppress in metadata:
            continue
        if dataclasses.is_dataclass(form):
            yield from list_options(form, prefix if form is Config else f"{prefix}{key}.")
            continue
        yield as_option(f"{prefix}{key}")
        if form is bool and FlagCreatePairsOff not in metadata:
            yield as_option(f"{prefix}no_{key}")


def _report(
    event: tyro_errors.ParseErrorEvent,
    *,
    name: str,
    words: Sequence[str],
    options: Sequence[str],
    missing: Callable[[tyro_errors.MissingArgs], UsageError],
) -> NoReturn:
    """Raise a UsageError that describes one of tyro's errors."""
    match event:
        case tyro_errors.MissingArgs():
            raise missing(event)
        case tyro_errors.BadValue(argument=argument):
            raise UsageError(f"{_name_of(argument, words)} needs a value")
        case tyro_errors.InvalidChoice(argument=argument, value=value, choices=choices):
            # The choices of an optional value have no fixed order.
            own = sorted({*choices} - {"None"}) if "None" in choices else list(choices)
            listed = " or ".join(own) if len(own) < 3 else f"one of {', '.join(own)}"
            hint = did_you_mean(value, own)
            raise UsageError(f"{_name_of(argument, words)} must be {listed}, got {value!r}{hint}")
        case tyro_errors.UnrecognizedArgs(tokens=[token, *_]):
            for word in words:
                if word.startswith("--") and word.endswith(f"={token}"):
                    option = word.removesuffix(f"={token}")
                    raise UsageError(f"{option} takes no value, got {token!r}")
            if not re.match("--?[A-Za-z]", token):
                hint = "; repeat --import for each file" if token.endswith(".py") else ""
                raise UsageError(f"{name} got an unexpected argument {token!r}{hint}")
            option = token.partition("=")[0].replace("_", "-")
            raise UsageError(f"unknown option {token}{_suggest(option, options)}")
        case tyro_errors.InstantiationFailure(message=message, argument=argument):
            if argument is None:
                raise UsageError(" ".join(message.split()))
            found = re.search(
                r"(?:float: |base 10: |arguments: |instantiated from )(.+?)\.?$", message, re.M
            )
            value = ast.literal_eval(found[1]) if found else "another value"
            metavar = re.sub(r"\{?None\}?\||[{}]", "", argument.lowered.metavar or "")
            got = repr(value if isinstance(value, str) else " ".join(value))
            kind = WORDS.get(metavar, metavar)
            raise UsageError(f"{_name_of(argument, words)} must be {kind}, got {got}")
    raise UsageError(f"invalid arguments for {name}: {event}")


def _name_of(argument: "ArgumentDefinition", words: Sequence[str]) -> str:
    """Return the name of an option that the words contain. The name can be an alias."""
    names = argument.display_name().split("/")
    return next((name for name in names if name in given_options(words)), names[-1])


def _missing(name: str, command_type: type) -> UsageError:
    positional = (pair for _, pair in annotations(command_type).values() if Positional in pair)
    metavars = [getattr(m, "metavar", None) for metadata in positional for m in metadata]
    usage = " ".join(filter(None, (name, *metavars, "[OPTIONS]")))
    return UsageError(f"{name} needs {command_type.argument_name}: transformer-jax {usage}")


def _section_of(option: str) -> str:
    """Return "--model." for "--model.d-k", and "--" for an option without a section."""
    return option[: option.find(".") + 1] or "--"


def _suggest(option: str, options: Sequence[str]) -> str:
    """Suggest the option that is most similar, or return "" if no option is similar.

    Prefer an option with one more or one less "s", and then an option that begins with a section or
    ends with `-from`, but is otherwise the same.
    """
    number = [o for o in options if o in (f"{option}s", option.removesuffix("s")) and o != option]
    completed = [o for o in options if o == f"{option}-from" or o.endswith(f".{option[2:]}")]
    given, sections = _section_of(option), {_section_of(o) for o in options}
    [section] = difflib.get_close_matches(given, sections, n=1, cutoff=0.7) or [given]
    own = {o.removeprefix(section): o for o in options if o.startswith(section)}
    near = difflib.get_close_matches(option.removeprefix(given), own, n=1, cutoff=0.7)
    found = [*number, *completed, *(own[name] for name in near)]
    return f"; did you mean {found[0]}?" if found else ""
