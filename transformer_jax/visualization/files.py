"""Save pages and figures to files, and check file names. This module does not import matplotlib."""

from pathlib import Path

from transformer_jax.errors import UsageError, storage_errors
from transformer_jax.files import write_bytes

FIGURE_SUFFIXES = (".svg", ".png")
ATTENTION_SUFFIXES = (".html", *FIGURE_SUFFIXES)


def check_suffix(path: Path, suffixes: tuple[str, ...]) -> str:
    """Return a file's suffix in lowercase; raise UsageError if it is not one of `suffixes`."""
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        *others, last = suffixes
        comma = "," if len(others) > 1 else ""
        endings = f"{', '.join(others)}{comma} or {last}"
        raise UsageError(f"the file name must end in {endings}, got {str(path)!r}")
    return suffix


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically; raise StorageError if it cannot be written."""
    with storage_errors(f"{path} cannot be written"):
        write_bytes(path, content, durable=False)
