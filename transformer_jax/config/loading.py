"""Find and read a config file by path or name, such as `configs/table3.py:A1` or `table3:A1`.

A config file is the user's own Python code, and loading the file executes it. Stored configs, such
as those in a sweep's runs, are JSON, and loading them does not execute code.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from transformer_jax.config.schema import Config, Row
from transformer_jax.config.validation import ConfigError, checked, did_you_mean
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import INVALID_JSON, expand_path, is_file, parse_path, read_json
from transformer_jax.registry import IMPORTS, imported_files, inherit

PACKAGE = Path(__file__).parents[1]
_importing: ContextVar[str] = ContextVar("importing", default="")


def shipped_configs() -> Path:
    """Return the folder of shipped configs, in the installed package or in the repository."""
    installed = PACKAGE / "shipped" / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


@checked
def load_config(spec: str) -> Config:
    """Return the config that `spec` specifies.

    `spec` is the name of a shipped config or the path of a file. A Python file is executed. A JSON
    file contains a config, as a run's run.json does. "FILE:ROW" selects a row in a sweep.

    Raises:
        ConfigError: the file or the row does not exist, the file is invalid, or it has several rows
            and none is selected.
    """
    return load_row(spec).config


def load_row(spec: str) -> Row:
    """Return the experiment that `spec` specifies: FILE, or FILE:ROW for a row in a sweep."""
    rows = load_rows(spec)
    if len(rows) > 1:
        raise ConfigError(
            f"{spec} has {len(rows)} rows; choose one, such as {spec}:{next(iter(rows))} "
            f"(available: {', '.join(rows)})"
        )
    [row] = rows.values()
    return row


@checked
def load_rows(spec: str) -> dict[str, Row]:
    """Return the rows of FILE, or only FILE:ROW, by name. The name of a single experiment is "".

    Raises:
        ConfigError: the file or the row does not exist, or the file is invalid.
    """
    path, only = split_spec(spec)
    if path.endswith(".json"):
        if only is not None:
            raise ConfigError(f"{path} has one config, and no row {only!r}")
        return {"": Row(_read_json_config(resolve_path(path)))}
    rows = _rows_of(_execute(resolve_path(path)), path)
    if only is None:
        return rows
    if only not in rows:
        raise ConfigError(f"{path} has no row {only!r}{did_you_mean(only, rows)}")
    return {only: rows[only]}


def split_spec(spec: str) -> tuple[str, str | None]:
    """Split FILE:ROW. A colon inside the path, as in C:/x.py, is not a separator."""
    path, colon, row = spec.rpartition(":")
    if not colon or not row or "/" in row or "\\" in row:
        return spec, None
    return path, row


def run_name(spec: str) -> str:
    """Return the default run name for a config, such as "table3-A1" for configs/table3.py:A1."""
    path, row = split_spec(spec)
    return Path(path).stem + (f"-{row}" if row else "")


def merge_rows(loaded: Iterable[tuple[str, Mapping[str, Row]]]) -> dict[str, Row]:
    """Combine the rows of several config files, given as pairs of a spec and the file's rows.

    A row without a name is named after its file.

    Raises:
        UsageError: two files define a row differently.
    """
    rows: dict[str, Row] = {}
    for spec, by_name in loaded:
        for key, row in by_name.items():
            name = key or run_name(spec)
            if rows.setdefault(name, row) != row:
                raise UsageError(f"{spec} and an earlier file define row {name!r} differently")
    return rows


def resolve_path(path: str) -> Path:
    """Return the shipped config file named `path`, or else the file at `path`."""
    shipped = {file.stem: file for file in sorted(shipped_configs().glob("[a-z]*.py"))}
    if path in shipped:
        return shipped[path]
    path = expand_path(path)
    if is_file(Path(path)):
        return Path(path)
    hint = did_you_mean(Path(path).stem, shipped)
    raise ConfigError(f"no config file {path}{hint} (shipped: {', '.join(shipped)})")


def import_file(path: str) -> None:
    """Execute a user's Python file, which can register parts, in this and all child processes."""
    file = parse_path(path).resolve()
    if not file.is_file():
        raise UsageError(f"cannot import {path}: there is no such file")
    if file.suffix != ".py":
        raise UsageError(f"cannot import {path}: it is not a Python file (.py)")
    if file not in imported_files():
        token = _importing.set(path)
        try:
            _execute(file)
        except ConfigError as error:
            raise UsageError(f"cannot import {path}: {error}") from error
        finally:
            _importing.reset(token)
        inherit(file)


def check_not_importing(function: str) -> None:
    """Raise a UsageError if an imported file calls a function that trains.

    Workers import the files that register parts. If such a file is a script that trains, each
    worker would otherwise repeat all of its training.
    """
    if path := _importing.get():
        raise UsageError(
            f"{path} calls {function} while it is imported: call it only under "
            '`if __name__ == "__main__":`'
        )


def import_inherited() -> None:
    """Import the files that the parent process or the user listed in the variable `IMPORTS`."""
    files = imported_files()
    os.environ.pop(IMPORTS, None)
    for file in files:
        import_file(str(file))


def import_arguments() -> list[str]:
    """Return the command-line arguments that import the files that this process imported."""
    folder = Path.cwd()
    files = (f.relative_to(folder) if f.is_relative_to(folder) else f for f in imported_files())
    return [word for file in files for word in ("--import", str(file))]


def _read_json_config(path: Path) -> Config:
    try:
        data = read_json(path)
        # The file run.json, which describes a run, contains the run's config.
        is_run = "config" in data
        return Config.from_dict(data["config"] if is_run else data)
    except (ConfigError, StorageError, OSError, *INVALID_JSON) as error:
        raise ConfigError(f"{path} is not a config: {error}") from error


def _rows_of(names: Mapping[str, object], path: str) -> dict[str, Row]:
    """Return the rows that a config file defines; `names` contains its top-level variables."""
    if "SWEEP" in names:
        sweep = names["SWEEP"]
        if not isinstance(sweep, dict) or not sweep or not all(isinstance(k, str) for k in sweep):
            raise ConfigError(f"{path}: SWEEP must be a dictionary of rows by name")
    elif "CONFIG" in names:
        sweep = {"": names["CONFIG"]}
    else:
        raise ConfigError(f"{path} defines neither CONFIG nor SWEEP")
    rows: dict[str, Row] = {}
    for name, value in sweep.items():
        config = value.config if isinstance(value, Row) else value
        if not isinstance(config, Config):
            place = f"{path}:{name}" if name else path
            raise ConfigError(f"{place} must be a Config, got {type(config).__name__}")
        rows[name] = value if isinstance(value, Row) else Row(config)
    return rows


def _execute(path: Path) -> dict[str, object]:
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file")
    with _importable(path.resolve().parent):
        try:
            return runpy.run_path(str(path.resolve()))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{_error_location(path, error)}: {_error_message(error)}") from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a config file import `configs.x`, or `x` from its own folder; undo the imports on exit.

    The files in `folder` take precedence over shipped files. Undoing the imports prevents
    confusion between modules with the same name in different folders.
    """
    path, modules = list(sys.path), dict(sys.modules)
    sys.path[:0] = [str(folder.parent), str(folder), str(shipped_configs().parent)]
    for name in modules:
        if name.split(".")[0] == "configs":
            del sys.modules[name]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules.keys():
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.split(".")[0] == "configs" or Path(file).parent in _import_roots(folder):
                del sys.modules[name]
        sys.modules.update(modules)


def _import_roots(folder: Path) -> set[Path]:
    """Return the folders that a config file in `folder` can import from."""
    return {folder, folder / "configs", folder.parent / "configs", shipped_configs()}


def _error_location(path: Path, error: BaseException) -> str:
    """Return the file and line in the user's code that raised the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    roots = _import_roots(path.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent in roots]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else str(path)


def _error_message(error: BaseException) -> str:
    """Return the error message on one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
