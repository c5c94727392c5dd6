"""Base classes for commands. A command is a frozen dataclass with a `run` method.

Each field of a command is an argument, and the field's docstring is the argument's `--help` text.
Modules that need JAX are imported inside `run`, so that help and error messages appear immediately.
"""

import abc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, Suppress, arg

from transformer_jax.config import Config, Row, loading
from transformer_jax.config.rows import with_sections
from transformer_jax.console import shell_command
from transformer_jax.errors import Setting, StorageError, UsageError, storage_errors
from transformer_jax.files import find_free_path
from transformer_jax.runs.run_folder import RunFolder

ConfigArgument = Positional[
    Annotated[str, arg(metavar="CONFIG", help_behavior_hint="(required, and first)")]
]
RunArgument = Positional[Annotated[str, arg(metavar="RUN", help_behavior_hint="(required)")]]


@dataclass(frozen=True)
class ConfigCommand(abc.ABC):
    """Base class for commands that load a config and accept every config field as an option."""

    data_from: Annotated[str | None, arg(metavar="CONFIG")] = None
    """Use the data section of this config. Each row in a sweep keeps its own changes to the data
    section."""
    train_from: Annotated[str | None, arg(metavar="CONFIG")] = None
    """Use the train section of this config. Each row in a sweep keeps its own changes to the train
    section, and the ratio of its train.steps to the first row's train.steps stays the same."""
    decode_from: Annotated[str | None, arg(metavar="CONFIG")] = None
    """Use the decode section of this config. Each row in a sweep keeps its own changes to the
    decode section."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)
    arguments: Suppress[tuple[str, ...]] = ()
    """The command line, starting with the command's name."""

    argument_name: ClassVar[str] = "a config"
    common: ClassVar[tuple[str, ...]] = ()
    """The options that `--help` shows; `--help-all` shows all of them."""
    example: ClassVar[str] = ""
    """The arguments of an example in the help."""

    @abc.abstractmethod
    def load_rows(self) -> dict[str, Row]:
        """Return the rows, keyed by name. A single experiment has the name "".

        This method does not apply the command-line options that change config fields.
        """

    def select(self, rows: dict[str, Row], loaded: Mapping[str, Row]) -> dict[str, Row]:  # noqa: ARG002
        """Return the rows that the command uses.

        `loaded` contains the rows that `load_rows` returned, and `rows` contains the same rows with
        the command-line options applied.
        """
        return rows

    @abc.abstractmethod
    def run(self, rows: dict[str, Row]) -> None:
        """Run the command on the rows that `load_rows` returned, with all options applied."""

    def with_sections(self, rows: Mapping[str, Row], spec: str = "") -> dict[str, Row]:
        """Return the rows with `--data-from`, `--train-from`, and `--decode-from` applied.

        Each row keeps its differences from the first row. If `rows` contains only one row of a
        sweep, `spec` must be its FILE:ROW, because the row's differences are relative to the first
        row in FILE.
        """
        specs = {"data": self.data_from, "train": self.train_from, "decode": self.decode_from}
        sections = {key: loading.load_config(name) for key, name in specs.items() if name}
        path, row = loading.split_spec(spec)
        is_single = bool(sections) and row is not None
        first = next(iter(loading.load_rows(path).values())) if is_single else None
        return with_sections(rows, sections, first)


@dataclass(frozen=True)
class FileCommand(ConfigCommand):
    """Base class for commands that load one config file."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW for one row in a sweep, or the name of a shipped config, such as
    tiny."""

    def load_rows(self) -> dict[str, Row]:
        return self.with_sections({"": loading.load_row(self.file)}, self.file)


@dataclass(frozen=True)
class PathCommand(abc.ABC):
    """Base class for commands without options for config fields, such as `evaluate`."""

    argument_name: ClassVar[str] = "a run"

    @abc.abstractmethod
    def run(self) -> None:
        """Run the command."""

    def select_given(self, *names: str) -> dict[str, Any]:
        """Return the value of each named option that differs from its default."""
        values = {name: getattr(self, name) for name in names}
        return {name: x for name, x in values.items() if x != getattr(type(self), name)}


def translate_command(run: RunFolder, option: str = "") -> str:
    """Return a shell command that translates sample input or FILE with these options."""
    translate = f"{shell_command('translate', run.path)}{option}"
    is_number_words = run.config.data.corpus == "number_words"
    return f"echo 'forty-two' | {translate}" if is_number_words else f"{translate} < FILE"


def check_new_file(path: Path, option: str = "out") -> None:
    """Check in advance that a command can create a file without overwriting an existing one."""
    with storage_errors(f"{path} cannot be written"):
        if path.exists():
            free = str(find_free_path(path))
            raise UsageError(
                f"{path} already exists: write another file with `", Setting(option, free), "`"
            )
        is_folder = path.parent.is_dir()
    if not is_folder:
        raise StorageError(f"{path} cannot be written: {path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be written: {path.parent} is not writable")
