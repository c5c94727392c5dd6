"""Replace files atomically: a reader sees either the old or the new content, never a mixture."""

import json
import os
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Replace a file with JSON, atomically and durably; see `write_text`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file with text, atomically and durably; if it fails, the old content remains."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
