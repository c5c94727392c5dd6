"""The folder for what can be made again: prepared text and compiled programs."""

import os
import tempfile
from pathlib import Path

from transformer_jax.errors import StorageError


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, made if it is not there.

    It lies in `$TRANSFORMER_JAX_CACHE`, or `transformer_jax` in `$XDG_CACHE_HOME` or
    `~/.cache`; where none of them can be written, among the system's temporary files.
    """
    named = os.environ.get("TRANSFORMER_JAX_CACHE")
    if named:
        return _make_directory(Path(named) / name)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    folder = Path(home) / "transformer_jax" / name
    try:
        # Without a home, "~" stays as it is: no folder of that name is wanted.
        if folder.is_absolute() and os.access(_make_directory(folder), os.W_OK):
            return folder
    except StorageError:
        pass
    temporary = Path(tempfile.gettempdir()) / f"transformer_jax-{os.getuid()}"
    _make_directory(temporary).chmod(0o700)
    return _make_directory(temporary / name)


def _make_directory(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the cache {folder} cannot be made: {error.strerror}") from error
    return folder


def enable_compilation_cache() -> None:
    """Let JAX keep compiled programs on disk: a second start need not compile again.

    A folder that the user named, by `JAX_COMPILATION_CACHE_DIR`, stays.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
