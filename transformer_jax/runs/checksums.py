"""The list of a folder's files with their SHA-256, by which damage is noticed.

Orbax keeps no digest of an array: one bit flipped in a file would be another model. The list is
in the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` can check a folder by hand.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

NAME = "SHA256SUMS"
# A list that is longer is none of ours; nothing of it is read.
MAX_BYTES = 16 << 20
# The same of a file that is read whole: enough for the sums of 800,000 steps without a report.
MAX_FILE = 64 << 20
LINE = re.compile(r"([0-9a-f]{64})  ([\w./=-]+)", re.ASCII)


class CorruptionError(Exception):
    """Files that are not as they were written: which one, and in what way."""


def write(folder: Path) -> None:
    """Write the list of all files of a folder, itself whole or not at all; all is on disk then."""
    lines = [f"{_digest(folder / name, sync=True)}  {name}\n" for name in sorted(_files(folder))]
    temporary = folder / f".{NAME}"
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(place)


def check(folder: Path) -> None:
    """Make sure that the folder's files are those of its list, bit for bit, and no others.

    Raises:
        DamagedError: one is not; or there is a link, or what is no plain file.
    """
    listed = _listed(folder)
    there = set(_files(folder)) - {NAME}
    for name in sorted(listed.keys() ^ there):
        raise CorruptionError(f"{name} is {'missing' if name in listed else 'not in its list'}")
    for name, digest in listed.items():
        if _digest(folder / name) != digest:
            raise CorruptionError(f"{name} is not what was written")


def read(folder: Path, name: str) -> bytes:
    """Return the content of one file, after making sure of it.

    Raises:
        DamagedError: it is not what was written.
    """
    listed = _listed(folder)
    if name not in listed or name not in set(_files(folder)):
        raise CorruptionError(f"{name} is missing")
    if (folder / name).stat().st_size > MAX_FILE:
        raise CorruptionError(f"{name} is too long")
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != listed[name]:
        raise CorruptionError(f"{name} is not what was written")
    return content


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _listed(folder: Path) -> dict[str, str]:
    """Return each file's digest by name, as the list has them."""
    path = folder / NAME
    if folder.is_symlink():
        raise CorruptionError(f"{folder.name} is a link")
    if path.is_symlink() or not path.is_file():
        raise CorruptionError(f"{NAME} is missing")
    if path.stat().st_size > MAX_BYTES:
        raise CorruptionError(f"{NAME} is too long")
    # Latin-1 has a character for every byte; whatever is not as we write it fits no line.
    lines = path.read_bytes().decode("latin-1").split("\n")
    if lines.pop() or not all(matches := [LINE.fullmatch(line) for line in lines]):
        raise CorruptionError(f"{NAME} is not what was written")
    return {match[2]: match[1] for match in matches if match}


def _files(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield the names of all files, relative to the folder; links are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                raise CorruptionError(f"{name} is no plain file")


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
