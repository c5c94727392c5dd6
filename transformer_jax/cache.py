"""The user's cache of prepared text and compiled programs, which is safe to delete at any time."""

import functools
import os
import tempfile
from pathlib import Path

from transformer_jax.errors import StorageError, UsageError, storage_errors
from transformer_jax.files import URL, parse_path
from transformer_jax.progress import note


def cache_folder(name: str) -> Path:
    """Return the path of the folder `name` in the user's cache; create the folder if necessary.

    The cache is $TRANSFORMER_JAX_CACHE or, by default, `transformer_jax` in $XDG_CACHE_HOME or
    ~/.cache. If the default is not writable, the cache is a private folder in the system's
    temporary directory.
    """
    if root := os.environ.get("TRANSFORMER_JAX_CACHE"):
        if URL.match(root):
            raise UsageError(
                f"TRANSFORMER_JAX_CACHE is {root}, but the cache must be a local folder: unset the "
                f"variable, and copy {root} to ~/.cache/transformer_jax before you run the command"
            )
        return _make_directory(parse_path(root) / name)
    home = parse_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = home / "transformer_jax" / name
    try:
        # If there is no home directory, expanduser returns "~" unchanged. Do not create a folder
        # named "~".
        if folder.is_absolute() and os.access(_make_directory(folder), os.W_OK):
            return folder
    except StorageError:
        pass
    temporary = Path(tempfile.gettempdir()) / f"transformer_jax-{os.getuid()}"
    with storage_errors(f"the cache folder {temporary} cannot be made private"):
        _make_directory(temporary).chmod(0o700)
    return _make_directory(temporary / name)


def enable_compilation_cache() -> None:
    """Unless `JAX_COMPILATION_CACHE_DIR` is set, let JAX store programs in the user's cache.

    If the cache is not writable, a note says so, and JAX compiles the programs in each process.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder("programs")
        if not os.access(folder, os.W_OK):
            raise StorageError(f"the cache folder {folder} is not writable")
    except StorageError as error:
        _note_once(f"{error}; compiled programs are not stored")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@functools.cache
def _note_once(message: str) -> None:
    note(message)


def _make_directory(folder: Path) -> Path:
    with storage_errors(f"the cache folder {folder} cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
