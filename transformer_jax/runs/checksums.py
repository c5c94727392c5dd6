"""Use SHA-256 digests to detect damage to the files in a folder.

Orbax does not store digests of arrays, so a flipped bit would silently change the restored model.
The digests are stored in `sha256sum` format, so users can verify a folder with
`sha256sum -c SHA256SUMS`.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from transformer_jax.files import MAX_JSON_BYTES, MAX_METRICS_BYTES, is_stray, sync, write_text

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([\w./=-]+)", re.ASCII)
T = TypeVar("T")
Digests = dict[str, set[str]]
"""The digests of each file. A file that is being replaced has two digests."""


class CorruptionError(Exception):
    """A file differs from what was written. The message names the file and the problem."""


def write(folder: Path) -> None:
    """Write the digests of all files in a folder, and wait until everything is on disk."""
    names = sorted(_files(folder))
    digests = {name: {_digest(folder / name, flush=True)} for name in names}
    write_text(folder / NAME, _format_digests(digests))
    for one_folder in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(one_folder)


def replace(folder: Path, name: str, text: str) -> None:
    """Replace a file durably, so that the folder matches its SHA256SUMS file at all times.

    In the meantime, SHA256SUMS lists both digests of the file. If this process ends before it
    removes the old digest, `finish_replacement` removes it later.
    """
    digests, new = _read_digests(folder), hashlib.sha256(text.encode()).hexdigest()
    _overwrite(folder, NAME, _format_digests(digests | {name: digests[name] | {new}}))
    _overwrite(folder, name, text)
    _overwrite(folder, NAME, _format_digests(digests | {name: {new}}))


def finish_replacement(folder: Path) -> None:
    """If an interrupted `replace` left two digests of a file, remove the outdated one."""
    for name, known in (digests := _read_digests(folder)).items():
        if len(known) > 1 and (digest := _digest(folder / name)) in known:
            _overwrite(folder, NAME, _format_digests(digests | {name: {digest}}))


def _overwrite(folder: Path, name: str, text: str) -> None:
    """Replace a file. The folder may be in use, so it must not contain a temporary file."""
    path = folder / name
    temporary = folder.with_name(f".{folder.name}.{path.name}")
    temporary.write_text(text, "utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def check(folder: Path) -> None:
    """Raise a CorruptionError unless a folder's files match its SHA256SUMS file.

    Files that other programs leave behind are ignored (see `files.is_stray`), and so are copies
    of listed files that a synchronization tool renamed, such as "b-LAPTOP.json".
    """
    _read_stable(folder, lambda digests: _check(folder, digests))


def _check(folder: Path, digests: Digests) -> None:
    names = set(_files(folder)) - {NAME}
    stems = {f"{PurePosixPath(name).with_suffix('')}-" for name in (*digests, NAME)}
    extra = {name for name in names - digests.keys() if not name.startswith(tuple(stems))}
    for name in sorted((digests.keys() - names) | extra):
        raise CorruptionError(f"{name} is {'missing' if name in digests else 'not listed'}")
    for name, known in digests.items():
        if _digest(folder / name) not in known:
            raise CorruptionError(f"{name} {_describe_change(folder / name, known)}")


@contextlib.contextmanager
def listed_files(folder: Path) -> Iterator[Path]:
    """Yield a folder that contains only the listed files, because Orbax reads every file."""
    digests = _read_digests(folder)
    paths = (path for path in folder.rglob("*") if path.is_file())
    if {path.relative_to(folder).as_posix() for path in paths} <= {*digests, NAME}:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        clean = Path(temporary) / folder.name
        for name in digests:
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            (clean / name).symlink_to(folder.absolute() / name)
        yield clean


def _describe_change(path: Path, known: set[str]) -> str:
    if path.stat().st_size <= MAX_JSON_BYTES:
        text = path.read_bytes().replace(b"\r\n", b"\n")
        if hashlib.sha256(text).hexdigest() in known:
            return "has different line endings: clone the repository with `-c core.autocrlf=false`"
    return "differs from what was written"


def read(folder: Path, name: str) -> bytes:
    """Return a file's contents; raise a CorruptionError if it is missing, too long, or damaged."""
    return _read_stable(folder, lambda digests: _read(folder, name, digests))


def _read(folder: Path, name: str, digests: Digests) -> bytes:
    path = folder / name
    if name not in digests or name not in set(_files(folder)):
        raise CorruptionError(f"{name} is missing")
    if path.stat().st_size > MAX_METRICS_BYTES:
        raise CorruptionError(f"{name} is too long")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() not in digests[name]:
        raise CorruptionError(f"{name} differs from what was written")
    return content


def _read_stable(folder: Path, function: Callable[[Digests], T]) -> T:
    """Apply a function to the digests, and retry if a concurrent `replace` changes them."""
    digests = _read_digests(folder)
    while True:
        try:
            return function(digests)
        except CorruptionError:
            before, digests = digests, _read_digests(folder)
            if digests == before:
                raise


def _format_digests(digests: Digests) -> str:
    return "".join(f"{x}  {name}\n" for name, known in digests.items() for x in sorted(known))


def _read_digests(folder: Path) -> Digests:
    path = folder / NAME
    if folder.is_symlink():
        raise CorruptionError(f"{folder.name} is a link")
    if path.is_symlink() or not path.is_file():
        raise CorruptionError(f"{NAME} is missing")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptionError(f"{NAME} is too long")
    # Latin-1 decodes any byte; the pattern then rejects every line that `write` cannot produce.
    lines = path.read_bytes().decode("latin-1").replace("\r\n", "\n").split("\n")
    if lines.pop() or not all(matches := [LINE.fullmatch(line) for line in lines]):
        raise CorruptionError(f"{NAME} differs from what was written")
    digests: Digests = {}
    for match in filter(None, matches):
        digests.setdefault(match[2], set()).add(match[1])
    return digests


def _files(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield the path of each file that is not stray; raise CorruptionError for a special file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if is_stray(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                raise CorruptionError(f"{name} is not a regular file")


def _digest(path: Path, *, flush: bool = False) -> str:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
