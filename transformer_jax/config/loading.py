"""Find a config by path or name, and read it: `configs/table3.py:A1`, or `table3:A1`.

A config file is the user's own Python: it is executed. What is stored never is: it is JSON, as a
sweep keeps for each of its runs.
"""

import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from transformer_jax.config.schema import Config, Row
from transformer_jax.config.validation import ConfigError, did_you_mean

PACKAGE = Path(__file__).parents[1]


def shipped_configs() -> Path:
    """Return the folder of the configs that came with the package, or that lie beside it."""
    installed = PACKAGE / "shipped" / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def load_config(spec: str) -> Config:
    """Return the one experiment that `spec` names: FILE, or FILE:ROW for a row of a sweep.

    Raises:
        ConfigError: there is no such file or row, or it has a mistake.
    """
    rows = load_rows(spec)
    if len(rows) > 1:
        raise ConfigError(
            f"{spec} has {len(rows)} rows; name one: {spec}:{next(iter(rows))} "
            f"(there are {', '.join(rows)})"
        )
    [row] = rows.values()
    return row.config


def load_rows(spec: str) -> dict[str, Row]:
    """Return all rows of a sweep by name, or the one experiment of a file under "".

    Raises:
        ConfigError: as `load_config`.
    """
    path, only = _split(spec)
    if path.endswith(".json"):
        if only is not None:
            raise ConfigError(f"{path} has one config, and no row {only!r}")
        return {"": Row(_read_json_config(resolve_path(path)))}
    module = _execute(resolve_path(path))
    if hasattr(module, "SWEEP"):
        sweep = module.SWEEP
        if not isinstance(sweep, dict) or not sweep or not all(isinstance(k, str) for k in sweep):
            raise ConfigError(f"{path}: SWEEP must be a table of rows by name")
        rows = {name: row if isinstance(row, Row) else Row(row) for name, row in sweep.items()}
    elif hasattr(module, "CONFIG"):
        rows = {"": Row(module.CONFIG)}
    else:
        raise ConfigError(f"{path} defines neither CONFIG nor SWEEP")
    for name, row in rows.items():
        if not isinstance(row.config, Config):
            where = f"{path}:{name}" if name else path
            raise ConfigError(f"{where} is no Config, but {type(row.config).__name__}")
    if only is not None:
        if only not in rows:
            raise ConfigError(f"{path} has no row {only!r}{did_you_mean(only, rows)}")
        rows = {only: rows[only]}
    return rows


def run_name(spec: str) -> str:
    """Return the name of a run by its config: "table3-A1" for configs/table3.py:A1."""
    path, row = _split(spec)
    return Path(path).stem + (f"-{row}" if row else "")


def resolve_path(path: str) -> Path:
    """Return the file of this path, or of this name among the shipped ones."""
    given = Path(path)
    shipped = {file.stem: file for file in sorted(shipped_configs().glob("*.py"))}
    if path in shipped:
        return shipped[path]
    if os.path.isfile(given):  # noqa: PTH113 - Path's raises where a name is too long to be one
        return given
    raise ConfigError(
        f"no config file {path}{did_you_mean(given.stem, shipped)} (shipped: {', '.join(shipped)})"
    )


def _read_json_config(path: Path) -> Config:
    try:
        return Config.from_dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no config: {error}") from error


def _split(spec: str) -> tuple[str, str | None]:
    """Part FILE from ROW. A colon that belongs to the path, as in C:/x.py, stays."""
    head, colon, row = spec.rpartition(":")
    if not colon or not row or "/" in row or "\\" in row:
        return spec, None
    return head, row


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a config file import `configs.x`, or x beside it: its own first, then the shipped ones.

    What was imported is forgotten afterwards, so that the configs of two folders do not mix.
    """
    path, modules = list(sys.path), dict(sys.modules)
    sys.path[:0] = [str(folder.parent), str(folder), str(shipped_configs().parent)]
    for name in [name for name in modules if name.split(".")[0] == "configs"]:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules]:
            file = getattr(sys.modules[name], "__file__", None)
            if name.split(".")[0] == "configs" or (
                file and Path(file).parent in _import_roots(folder)
            ):
                del sys.modules[name]
        sys.modules.update(modules)


def _import_roots(folder: Path) -> set[Path]:
    """Return where the configs lie that a file in `folder` may import."""
    return {folder, folder / "configs", folder.parent / "configs", shipped_configs()}


def _execute(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"_config_{path.stem}", path.resolve())
    if specification is None or specification.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(specification)
    with _importable(path.resolve().parent):
        try:
            specification.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{_error_location(path, error)}: {_error_message(error)}") from error
    return module


def _error_location(path: Path, error: BaseException) -> str:
    """Return the file and line of the user's that raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    homes = _import_roots(path.resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent in homes]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else str(path)


def _error_message(error: BaseException) -> str:
    """Return a one-line reason; an unknown field of a dataclass gets the nearest right name."""
    from transformer_jax.config import schema

    unknown = re.match(
        r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)
    )
    if unknown is not None and hasattr(schema, unknown[1]):
        fields = getattr(schema, unknown[1]).__dataclass_fields__
        return f"unknown field {unknown[2]!r} of {unknown[1]}{did_you_mean(unknown[2], fields)}"
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
