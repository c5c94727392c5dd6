"""Replace files atomically: a reader sees either the old or the new contents, never a mix."""

import json
import os
import secrets
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Atomically and durably replace a file's contents with JSON; see `write_text`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically and durably replace a file's contents. On failure, the old contents remain."""
    # Several processes or threads may write the same file, so each uses its own temporary file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Sync the folder, so that the replacement also survives a power failure.
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
