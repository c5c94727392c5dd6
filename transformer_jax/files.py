"""Files and folders: atomic writes, locks, limited reads, JSON, and new folders.

Another person's folder may be malicious, so the functions that read files limit the number of bytes
and reject special files.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from transformer_jax.errors import Setting, StorageError, UsageError, storage_errors
from transformer_jax.progress import note

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object that this package reads or writes, such as a config or an evaluation."""

INVALID_JSON = (ValueError, TypeError, OverflowError, RecursionError)
"""The exceptions that parsing JSON and converting its values can raise, except for KeyError."""

# Size limits in bytes, so that oversized malicious files are rejected before they are read.
# `MAX_JSON_BYTES` also applies to checksum files. `MAX_METRICS_BYTES` is enough for about
# 200,000 reports.
MAX_JSON_BYTES = 16 << 20
MAX_METRICS_BYTES = 64 << 20
MAX_VOCABULARY_BYTES = 256 << 20
ABANDONED_SECONDS = 60.0
# The start of a URL. `pathlib` merges the slashes, so only known schemes are then recognizable.
URL = re.compile(
    r"[a-z][a-z0-9+.-]+://|(gs|s3|s3a|hdfs|https?|ftp|file|abfss?|az|wasbs?|dbfs|hf|r2|oci):/",
    re.IGNORECASE,
)

# The names of files that operating systems, editors, notebooks, network drives, and tools that
# synchronize folders leave behind, such as .DS_Store, Thumbs.db, and "x (conflicted copy)". This
# package does not read files with such names.
STRAY = re.compile(
    r"[.~#@$].*|.*[~#]|thumbs\.db.*|ehthumbs.*|desktop\.ini|icon\r|lost\+found|__pycache__"
    r"|system volume information|.*\.(sw[a-p]|bak|orig|pyc|icloud|crdownload|part|download)"
    r"|.*\.sync-conflict-.*|.*\((.*(conflict|copy).*|\d+)\).*|.* copy( \d+)?(\..*)?",
    re.IGNORECASE | re.DOTALL,
)


def expand_path(path: str) -> str:
    """Return a path that a user wrote, with `~` replaced by the home folder.

    Raises:
        UsageError: the path is a URL, such as gs://bucket/run.
    """
    if URL.match(path):
        url = re.sub(":/+", "://", path, count=1)
        raise UsageError(f"{url} is a URL, but only local paths work: mount it, or copy its files")
    # If there is no home folder, os.path.expanduser does not change the path.
    return os.path.expanduser(path)  # noqa: PTH111


def parse_path(path: str | Path) -> Path:
    """Return a path that a user chose; see `expand_path`."""
    return Path(expand_path(str(path)))


DIGEST = "sha256_of_fields"
"""The first field of each JSON file: the SHA-256 of its other fields."""


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Atomically and durably replace a file's contents with JSON that contains its digest."""
    fields = {key: value for key, value in content.items() if key != DIGEST}
    content = {DIGEST: _digest(fields), **fields}
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _digest(content: Mapping[str, object]) -> str:
    # Convert the fields to JSON and back, which turns tuples into lists and keys into strings.
    fields = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Atomically and durably replace a file's contents with UTF-8 text; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file's contents atomically: a reader sees the old or the new contents, never a mix.

    On failure, the old contents remain. If `durable` is true, the new contents also survive a power
    failure.
    """
    # Several processes or threads may write the same file, so each uses its own temporary file. Its
    # name must not be too long if the file's own name is not.
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        if durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_lock(file: IO[str], *, shared: bool = False) -> bool:
    """Try to lock an open file until it is closed; return whether this process holds the lock."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


def unlock(file: IO[str]) -> None:
    """Release the lock of an open file."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def lock_folder(folder: Path, *, waits: bool = False) -> Iterator[bool]:
    """Lock a folder itself; yield False if another process holds the lock, and True otherwise.

    If `waits` is true, wait for the other process instead of yielding False. If the file system
    cannot lock folders, as with NFS, yield True without a lock.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    is_free = True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            is_free = False
        except OSError:
            pass
        yield is_free
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive(path: Path, on_wait: Callable[[], object] = bool) -> Iterator[IO[str]]:
    """Hold a lock file during the `with` statement. Before waiting for it, call `on_wait`."""
    with path.open("a+", encoding="utf-8") as file:
        if not try_lock(file):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def is_stray(name: str) -> bool:
    """Return whether this is the name of a file that other programs leave behind; see `STRAY`."""
    return STRAY.fullmatch(name) is not None


def part_of_name(name: str) -> str:
    """Convert a name to one that can be part of a new file's name without matching `STRAY`."""
    return re.sub(r"[^\w.]+", "_", name[:60])


def is_file(path: Path) -> bool:
    """Return whether a path is a file. Raise a StorageError if this cannot be determined.

    For example, the user may lack permission to read a folder. In this case, `Path.is_file` returns
    False in Python 3.14, and raises an `OSError` in earlier versions.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def check_regular(path: Path) -> os.stat_result:
    """Return a file's status; raise a StorageError for a pipe or device, which can block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path} is not a regular file")
    return status


def check_size(path: Path, max_bytes: int) -> None:
    """Raise a StorageError if a path is not a regular file of at most `max_bytes` bytes."""
    if check_regular(path).st_size > max_bytes:
        raise StorageError(f"{path} is invalid: it has more than {max_bytes >> 20} MiB")


def read_limited(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return a file's contents. Raises the same errors as `check_size`."""
    check_size(path, max_bytes)
    return path.read_bytes()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Return the object in a JSON file, without its digest, which an edited file may lack.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: the file cannot be read, is invalid, or differs from what was written.
    """
    try:
        content = read_limited(path, max_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict):
            raise TypeError("it does not contain a JSON object")
        # The field may have moved into another object, so look for its name anywhere.
        if DIGEST.encode() in content and fields.pop(DIGEST, None) != _digest(fields):
            raise StorageError(
                f"{path} differs from what was written: restore the file, or delete the line "
                f"{DIGEST!r} to accept its contents"
            )
    except INVALID_JSON as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    return fields


def read_json_if_valid(path: Path) -> JsonObject:
    """Return the object in a JSON file, or {} if it is missing or damaged. Note any damage."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return read_json(path)
        except StorageError as error:
            note(f"{error}; the file is ignored")
    return {}


def check_no_links(folder: Path, is_checked: Callable[[str], bool] = bool) -> None:
    """Raise a StorageError for a link or special file, which could redirect reads and writes.

    Check the entries of `folder` whose names satisfy `is_checked`, and everything inside them
    except the contents of stray folders. The folder itself can be a link.
    """
    folders = [str(folder)]
    while folders:
        parent = folders.pop()
        # Ignore files that disappear during the check, because training may still be in progress.
        with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
            for entry in entries:
                if parent == str(folder) and not is_checked(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not is_stray(entry.name):
                        folders.append(entry.path)
                elif entry.name.startswith(".#"):
                    # Emacs locks a file by creating a link whose target does not exist.
                    continue
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                    raise StorageError(
                        f"{entry.path} is a link or a special file, which this folder must not "
                        "contain (`cp -rL` copies the files that links point to)"
                    )


@contextlib.contextmanager
def new_folder(path: Path, advise: Callable[[Path], str] | None = None) -> Iterator[Path]:
    """Yield a private folder, and rename it to `path` on exit or, after an error, delete it."""
    check_available(path, advise)
    with storage_errors(f"{path} could not be written"):
        # A link cannot be replaced by a folder, but the empty folder that it points to can be.
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        with (
            tempfile.TemporaryDirectory(
                prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
            ) as private,
            lock_folder(Path(private)),
        ):
            # A temporary folder is private, but its subfolder has ordinary permissions.
            folder = Path(private) / "new"
            folder.mkdir()
            yield folder
            try:
                folder.rename(target)
            except OSError:
                # Another process may have created the folder in the meantime.
                check_available(path, advise)
                raise


def _remove_abandoned(path: Path) -> None:
    """Remove the private folders that killed processes left when they were creating `path`."""
    for private in path.parent.glob(f".{glob.escape(path.name)}-????????"):
        with contextlib.suppress(OSError), lock_folder(private) as is_free:
            # A process locks its folder soon after it creates the folder.
            is_old = time.time() - private.stat().st_mtime > ABANDONED_SECONDS
            if is_free and is_old and {x.name for x in private.iterdir()} <= {"new"}:
                shutil.rmtree(private)


def check_utf8(path: Path, advice: str) -> None:
    """Raise a UsageError that ends with the given advice if a path is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the path {path} is not UTF-8: {advice}") from error


def check_available(path: Path, advise: Callable[[Path], str] | None = None) -> None:
    """Check that a folder can be created or is empty, without changing it.

    The message of a UsageError contains advice and a new path. `advise(path)` returns the advice;
    the default is to choose another folder.
    """
    # TensorBoard and Orbax reject a path that is not UTF-8, but only after the run is created.
    check_utf8(path, "choose another one")
    with storage_errors(f"{path} cannot be read"):
        # Replacing the working directory, even if it is empty, would leave the shell without one.
        is_replaceable = path.is_dir() and path.resolve() != Path.cwd()
        if not path.exists() or (is_replaceable and not any(path.iterdir())):
            parent = next(parent for parent in path.absolute().parents if parent.exists())
            if not parent.is_dir():
                raise StorageError(f"{path} cannot be created: {parent} is not a folder")
            if not os.access(parent, os.W_OK):
                raise StorageError(f"{path} cannot be created: {parent} is not writable")
            return
    # Resolve paths such as "." and "..", because they have no name to append a number to.
    named = path if path.name not in ("", "..") else path.resolve()
    other = find_free_path(named, is_folder=True)
    advice = "choose another folder" if advise is None else advise(path)
    raise UsageError(
        f"{path} already exists: {advice} with `", Setting("out", str(other), "path"), "`"
    )


def find_free_path(
    path: Path,
    is_free: Callable[[Path], bool] = lambda path: not path.exists(),
    *,
    is_folder: bool = False,
) -> Path:
    """Return the path or, if it is not free, the first free one among NAME-2, NAME-3, and so on.

    The number precedes the suffix of a file. A folder such as `lr-0.5` has no suffix.
    """
    stem, suffix = (path.name, "") if is_folder else (path.stem, path.suffix)
    others = (path.with_name(f"{stem}-{count}{suffix}") for count in itertools.count(2))
    return next(other for other in itertools.chain([path], others) if is_free(other))
