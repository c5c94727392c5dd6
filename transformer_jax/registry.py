"""Parts that an experiment can swap, such as norms and optimizers, registered by name.

A config field selects a part by its name: if `model.norm` is "rms_norm", the model uses the part
that is registered under that name. Parts of this package and parts in a user's own file are
registered in the same way:

    @transformer_jax.register("model.norm", "scale_norm")
    class ScaleNorm(nn.Module): ...

`docs/extending.md` describes the parts for each field. This module does not import JAX.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from transformer_jax.errors import ConfigError, UsageError

T = TypeVar("T")
PACKAGE = Path(__file__).parent
# A name appears in config files, on the command line, and in paths.
NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Part:
    """A registered class or function."""

    value: Any
    is_foreign: bool
    file: Path | None
    """The file that registered the part, or None if it was registered in a notebook or terminal."""
    line: int = 0
    module_code: CodeType | None = None
    """The running code at the file's top level, which each import of the file creates again."""


_parts: dict[str, dict[str, Part]] = {}
IMPORTS = "TRANSFORMER_JAX_IMPORT"
"""The environment variable that lists files to import, separated like the folders in PATH.

In a path, special characters such as ":" are escaped as in a URL.
"""
_reserved: dict[str, tuple[str, ...]] = {}
_digests: dict[Path, str] = {}


class Registry(Mapping[str, T]):
    """The parts that a config field can select. All registries for a field share their parts."""

    def __init__(self, field: str, *, reserved: tuple[str, ...] = ()) -> None:
        """Open a field's registry, in which only this package can register names in `reserved`."""
        self._field = field
        _reserved.setdefault(field, reserved)
        self._parts = _parts.setdefault(field, {})

    def register(self, name: str, /) -> Callable[[T], T]:
        """Return a decorator that registers its argument. See `register`."""
        return _register(self._field, name, sys._getframe(1))

    def __getitem__(self, name: str) -> T:
        """Return a part. A valid config contains only names that exist."""
        return self._parts[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def register(field: str, name: str) -> Callable[[T], T]:
    """Return a decorator that makes a class or function available as a value of a config field.

    For example, after `@register("model.norm", "scale_norm")`, the command-line option
    `--model.norm scale_norm` selects the decorated class. A new definition in the same file or
    notebook replaces the old one, so a notebook cell can run again.

    Raises:
        ConfigError: the field does not select parts, the name is not valid, or the name is already
            registered by this package, by another file, or elsewhere in this file.
    """
    return _register(field, name, sys._getframe(1))


def _register(field: str, name: str, frame: FrameType) -> Callable[[T], T]:
    caller, line, code = Path(frame.f_code.co_filename), frame.f_lineno, _module_code(frame)
    file = caller.resolve() if caller.is_file() else None
    parts = _parts.get(field)
    if parts is None:
        known = ", ".join(sorted(_parts))
        raise ConfigError(f"{field} is not a config field that selects parts (these are: {known})")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        rule = "start with a letter and contain only lowercase letters, digits, and underscores"
        raise ConfigError(f"the name of a part of {field} must {rule}, got {name!r}")
    is_foreign = file is None or not file.is_relative_to(PACKAGE)
    old = parts.get(name)
    if old is not None and code is not None and old.module_code is code:
        raise ConfigError(
            f"{field} {name!r} is registered twice in {caller.name}, on line {old.line} and on "
            f"line {line}: choose another name for one of the parts"
        )
    if is_foreign and (name in _reserved[field] or (old is not None and old.file != file)):
        place = "this package" if old is None else old.file or "a notebook"
        raise ConfigError(f"{field} {name!r} is already registered by {place}: choose another name")

    def add(value: T) -> T:
        # Flax modules are dataclasses. If Flax is not imported yet, the part is not a module.
        linen = sys.modules.get("flax.linen")
        is_module = linen and isinstance(value, type) and issubclass(value, linen.Module)
        fields = getattr(value, "__dataclass_fields__", {})
        if field.startswith("model.") and is_module and "config" not in fields:
            raise ConfigError(
                f"the class of {field} {name!r} has no field named config: add "
                "`config: transformer_jax.ModelConfig`"
            )
        parts[name] = Part(value, is_foreign, file, line, code)
        if file is not None and is_foreign:
            # Compute the digest now, because the file may change while this process runs.
            _digests[file] = hashlib.sha256(file.read_bytes()).hexdigest()
            inherit(file)
        return value

    return add


def _module_code(frame: FrameType | None) -> CodeType | None:
    """Return the code at the top level of a frame's file, if that code is running."""
    file = None if frame is None else frame.f_code.co_filename
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == file:
            return frame.f_code
        frame = frame.f_back
    return None


def foreign_names(field: str) -> list[str]:
    """Return the names of a field's parts that are registered outside this package."""
    return [name for name, part in _parts.get(field, {}).items() if part.is_foreign]


def describe_foreign(names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Describe the parts in `names` that are registered outside this package.

    The keys of `names` and of the result are fields. A description contains the part's name and,
    unless a notebook registered the part, the name and SHA-256 digest of its file.
    """
    described: dict[str, dict[str, str]] = {}
    for field, name in names.items():
        part = _parts.get(field, {}).get(name)
        if part is not None and part.is_foreign:
            described[field] = {"name": name}
            if (file := part.file) is not None:
                # In an ASCII locale, Python represents other characters as surrogates.
                file_name = os.fsencode(file.name).decode("utf-8", "replace")
                described[field] |= {"file": file_name, "sha256": _digests[file]}
    return described


def check_registered(path: Path, *described: Mapping[str, Mapping[str, object]]) -> None:
    """Raise a UsageError if a run or sweep uses parts that are not registered.

    Reading a folder never causes an import, because the folder holds only data. Each argument after
    the path is a stored result of `describe_foreign`.
    """
    missing = {
        (field, part["name"]): part.get("file")
        for parts in described
        for field, part in parts.items()
        if part["name"] not in foreign_names(field)
    }
    if not missing:
        return
    # A part of a notebook is mentioned only if no file is missing.
    files = list(dict.fromkeys(str(file) for file in missing.values() if file is not None))
    named = [part for part, file in missing.items() if file is not None] or missing
    uses = f"{path} uses " + ", ".join(f"{field} {name!r}" for field, name in named)
    if not files:
        raise UsageError(
            f"{uses}, which was registered in a notebook or a terminal: define it again first"
        )
    names, their = " and ".join(files), "its path" if len(files) == 1 else "the path of each"
    verb = "registers" if len(files) == 1 else "register"
    raise UsageError(
        f"{uses}, which {names} {verb}: import {names} first (on the command line: --import, "
        f"followed by {their})"
    )


def imported_files() -> list[Path]:
    """Return the files that were imported or that registered parts."""
    files = filter(None, os.environ.get(IMPORTS, "").split(os.pathsep))
    return [Path(os.fsdecode(unquote_to_bytes(file))) for file in files]


def join_imports(files: Iterable[str | Path]) -> str:
    """Return a value for the environment variable `IMPORTS`."""
    return os.pathsep.join(quote(os.fsencode(file)) for file in files)


def inherit(file: Path) -> None:
    """Let child processes import a file."""
    os.environ[IMPORTS] = join_imports(dict.fromkeys([*imported_files(), file]))
