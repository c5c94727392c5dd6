"""Runs in buckets: every process works on a local copy and uploads its files in a safe order.

The copy of gs://bucket/run is the folder remote/gs/bucket/run in the user's cache. `local_path`
downloads what has changed, except for the arrays in checkpoints, which `repair` downloads when they
are read. While a run is being trained, `training` holds its lease, and `commit` uploads each
checkpoint in this order: the metrics, the arrays, and finally SHA256SUMS, because a checkpoint
without this file counts as incomplete. For the same reason, SHA256SUMS is deleted first. All other
code uses local paths; messages show URLs instead (see `errors.PATHS_SHOWN_AS`).
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from transformer_jax.cache import cache_folder
from transformer_jax.errors import PATHS_SHOWN_AS, StorageError, UsageError, storage_errors
from transformer_jax.files import (
    exclusive,
    expand_path,
    is_stray,
    read_json_if_valid,
    read_limited,
    try_lock,
    write_json,
)
from transformer_jax.remote import lease
from transformer_jax.remote.buckets import Bucket, Entry
from transformer_jax.remote.lease import Lease, lease_seconds

URL = re.compile(r"(gs|s3):(?:/+(.*))?")
ROOT, SUMS, METADATA = "remote", "SHA256SUMS", "checkpoint.json"
# A file in a checkpoint. The groups are the checkpoint's folder and the rest of the path.
CHECKPOINT_FILE = re.compile(r"((?:.*/)?checkpoints/[0-9]+)/(.+)")
NUM_THREADS = 8
# A listing can become outdated while its files are downloaded.
MAX_LISTINGS = 5
MAX_REPAIRS = 3
Stamp: TypeAlias = tuple[int, int]
"""The size of a local file and the time of its last change, which identify its contents."""


def local_path(path: str | Path) -> Path:
    """Return a path from the user, or the refreshed local copy of a gs:// or s3:// URL.

    Raises:
        UsageError: the URL has an unsupported scheme, or the library for its scheme is not
            installed.
        StorageError: the bucket cannot be read.
    """
    match = URL.fullmatch(str(path))
    if match is None:
        path = Path(expand_path(str(path)))
        if ROOT in path.parts:
            # The path can be that of a local copy, which messages show as a URL.
            _root()
        return path
    parts = PurePosixPath(match[2] or "").parts
    if not parts:
        raise UsageError(f"{path} names no bucket: write a URL such as {match[1]}://my-bucket/run")
    if any(is_stray(part) for part in parts):
        raise UsageError(f"{match[1]}://{match[2]} contains a name that runs cannot have")
    folder = _root().joinpath(match[1], *parts)
    _refresh(folder)
    return folder


def find_url(path: Path) -> str | None:
    """Return the URL of a path in a local copy, or None for any other path."""
    if ROOT not in path.parts or not path.is_relative_to(root := _root()):
        return None
    scheme, *parts = path.relative_to(root).parts
    return f"{scheme}://{'/'.join(parts)}"


def fetch(path: str, names: Iterable[str]) -> Path:
    """Download some files of a URL's folder, without listing it, and return the local copy.

    Return a local path unchanged.
    """
    match = URL.fullmatch(path)
    if match is None:
        return Path(path)
    folder = _root().joinpath(match[1], *PurePosixPath(match[2] or "").parts)
    with _exclusive(), storage_errors(f"{folder} cannot be written"):
        bucket = Bucket(path)
        _each(names, lambda name: bucket.download(name, folder / name))
    return folder


@contextlib.contextmanager
def uploading(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Upload the files that the body of the `with` statement writes, if `folder` is a local copy.

    Upload scores.json last. Until then, no other process on this machine refreshes the copy, which
    would delete the files that are not in the bucket yet.
    """
    url = find_url(folder)
    if url is None:
        yield
        return
    with _exclusive():
        yield
        bucket = Bucket(url)
        for is_last in (False, True):
            group = [name for name in names if (name == "scores.json") == is_last]
            _each(group, lambda name: bucket.write(name, folder / name))


def repair(checkpoint: Path) -> bool:
    """Download the checkpoint's files that are missing or damaged in the local copy.

    Return whether the folder is a local copy.
    """
    url = find_url(checkpoint)
    if url is None or not checkpoint.is_dir():
        return False
    bucket = Bucket(url)
    with contextlib.suppress(OSError):
        lines = (checkpoint / SUMS).read_text("utf-8", "replace").splitlines()
        listed = {tuple(line.split("  ", 1)[::-1]) for line in lines}
        for _ in range(MAX_REPAIRS):
            names = _safe(bucket.list())
            different = [x for x in names if (x, _digest(checkpoint / x)) not in listed]
            if set(different) <= {SUMS}:
                break
            _each(different, lambda x: bucket.download(x, checkpoint / x, keeps_damaged=True))
    return True


def publish(path: Path) -> None:
    """Upload a folder in a local copy, such as a report."""
    with uploading(path, list(_files(path))):
        pass


@contextlib.contextmanager
def training(folder: Path) -> Iterator[None]:
    """Hold the lease of a run in a bucket, refresh its copy, and upload it during training.

    For a local run, do nothing.

    Raises:
        UsageError: another process is training the run.
        StorageError: the bucket cannot be read or written.
    """
    url = find_url(folder)
    if url is None:
        yield
        return
    with (_state(folder, "lock")).open("a+", encoding="utf-8") as lock:
        with _exclusive():
            if not try_lock(lock):
                message = f"{folder} is being trained by another process on this machine"
                raise UsageError(message)
            lock.truncate(0)
            lock.write(str(folder))
            lock.flush()
        with Lease(url, _machine()) as held:
            session = _Session(_Copy(folder, Bucket(url)), held)
            session.copy.download()
            _sessions[folder] = session
            try:
                with session:
                    yield
            finally:
                del _sessions[folder]


def check_shared(folder: Path) -> None:
    """Raise a UsageError if the process with the lease is on a machine with a different cache."""
    if (url := find_url(folder)) is not None and folder not in set(_live_folders()):
        raise UsageError(
            f"the processes that train {url} need one cache: set TRANSFORMER_JAX_CACHE to a folder "
            "on a disk that all machines share"
        )


def commit(folder: Path) -> None:
    """Upload the changes to a run that this process is training. For other runs, do nothing.

    Raises:
        StorageError: the bucket cannot be written, or another process has taken the lease.
    """
    if (session := _sessions.get(folder)) is not None:
        session.upload()


def check(folder: Path) -> None:
    """Raise the StorageError from a background upload, if one has failed."""
    if (session := _sessions.get(folder)) is not None:
        session.check()


def has_failed(folder: Path) -> bool:
    """Return whether `check` raises an error."""
    session = _sessions.get(folder)
    return session is not None and session.error is not None


class _Copy:
    """The local copy of a run's folder, with the state of its objects in the bucket."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder, self._bucket = folder, bucket
        # The stamp of each object's local file; None if the file has not been downloaded.
        self._uploaded: dict[str, Stamp | None] = {}

    def download(self, live: Sequence[Path] = ()) -> None:
        """Make the local files match the bucket, except for arrays and the folders in `live`."""
        state = _state(self.folder, "json")
        stored = read_json_if_valid(state)
        skipped = tuple(f"{folder.relative_to(self.folder).as_posix()}/" for folder in live)
        with storage_errors(f"{self.folder} cannot be written"):
            for _ in range(MAX_LISTINGS):
                listed = _complete_entries(_safe(self._bucket.list()))
                entries = {k: v for k, v in listed.items() if not k.startswith(skipped or ("//",))}
                self._remove_others(entries, skipped or ("//",))
                if not (outdated := self._outdated(entries, stored)):
                    break
                _each(outdated, lambda name, found=entries: self._load(name, found[name], stored))
                write_json(state, stored)
        self._uploaded = {name: _stamp(self.folder / name) for name in entries}

    def upload(self, *, with_checkpoints: bool = True) -> None:
        """Upload new and changed files, and delete the objects whose files were deleted."""
        stamps = {name: _stamp(self.folder / name) for name in _files(self.folder)}
        local = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        # `repair` has downloaded these files in the meantime.
        self._uploaded |= {k: v for k, v in local.items() if self._uploaded.get(k, v) is None}
        changed = {
            name: stamp for name, stamp in local.items() if self._uploaded.get(name) != stamp
        }
        # A report is written before the score that makes it final, so read the scores first.
        kept = {
            name: content
            for name in changed
            if CHECKPOINT_FILE.fullmatch(name) and PurePosixPath(name).name in (SUMS, METADATA)
            if (content := _read(self.folder / name)) is not None
        }
        others = [name for name in changed if not CHECKPOINT_FILE.fullmatch(name)]
        # The file run.json makes a new run visible.
        for name in sorted(others, key=lambda name: (name == "run.json", name)):
            if (content := _read(self.folder / name)) is not None:
                self._write(name, content, changed[name])
        if with_checkpoints:
            matches = filter(None, map(CHECKPOINT_FILE.fullmatch, changed))
            for folder in sorted({match[1] for match in matches}):
                self._upload_checkpoint(folder, changed, kept)
            self._delete({name for name in self._uploaded if self._is_deleted(name, local)})

    def _upload_checkpoint(
        self, folder: str, changed: Mapping[str, Stamp], kept: Mapping[str, bytes]
    ) -> None:
        sums, metadata = f"{folder}/{SUMS}", f"{folder}/{METADATA}"
        arrays = [name for name in changed if name.startswith(f"{folder}/") and name not in kept]
        _each(arrays, lambda name: self._write(name, self.folder / name, changed[name]))
        if sums in self._uploaded and metadata in kept and sums in kept:
            # As in `checksums.replace`, list the digests of both the old and the new file in the
            # meantime.
            self._bucket.write(sums, _union(self._bucket.read(sums) or b"", kept[sums]))
        for name in (metadata, sums):
            if name in kept:
                self._write(name, kept[name], changed[name])

    def _is_deleted(self, name: str, local: Mapping[str, Stamp]) -> bool:
        match = CHECKPOINT_FILE.fullmatch(name)
        return name not in local if match is None else not (self.folder / match[1]).exists()

    def _delete(self, names: set[str]) -> None:
        first = {name for name in names if PurePosixPath(name).name == SUMS}
        for group in (first, names - first):
            _each(sorted(group), self._bucket.delete)
            for name in group:
                del self._uploaded[name]

    def _write(self, name: str, content: bytes | Path, stamp: Stamp) -> None:
        self._bucket.write(name, content)
        self._uploaded[name] = stamp

    def _outdated(self, entries: Mapping[str, Entry], stored: Mapping[str, object]) -> list[str]:
        """Return the names of the objects to download, except for the arrays in checkpoints."""
        outdated: list[str] = []
        for name, entry in entries.items():
            match, stamp = CHECKPOINT_FILE.fullmatch(name), _stamp(self.folder / name)
            is_current = stamp is not None and stored.get(name) == [entry.version, *stamp]
            if not is_current and (match is None or match[2] in (SUMS, METADATA)):
                outdated.append(name)
        return outdated

    def _load(self, name: str, entry: Entry, stored: dict[str, object]) -> None:
        path, is_array = self.folder / name, CHECKPOINT_FILE.fullmatch(name) is not None
        if self._bucket.download(name, path, keeps_damaged=is_array) and (stamp := _stamp(path)):
            stored[name] = [entry.version, *stamp]

    def _remove_others(self, entries: Mapping[str, Entry], skipped: tuple[str, ...]) -> None:
        """Remove local files that are not in the bucket, and folders without files."""
        if not entries and skipped == ("//",):
            shutil.rmtree(self.folder, ignore_errors=True)
        for name in list(_files(self.folder)):
            if name not in entries and not name.startswith(skipped):
                (self.folder / name).unlink(missing_ok=True)
        for parent, _, _ in os.walk(self.folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(parent).rmdir()


class _Session:
    """Uploads a run in the background and renews its lease while this process trains the run."""

    def __init__(self, copy: _Copy, held: Lease) -> None:
        self.copy, self._lease = copy, held
        self.error: StorageError | None = None
        self._lock, self._is_ending = threading.Lock(), threading.Event()
        actions = held.renew, self._upload_reports
        self._threads = [
            threading.Thread(target=self._repeat, args=(action,), daemon=True) for action in actions
        ]

    def upload(self) -> None:
        """Upload everything while the lease is valid."""
        self.check()
        with self._lock:
            self._lease.renew()
            self.copy.upload()

    def check(self) -> None:
        """Raise the error from an earlier upload, if one has failed."""
        if self.error is not None:
            raise self.error

    def _upload_reports(self) -> None:
        # An upload of a checkpoint includes the reports, so this method does not wait for it.
        if self._lock.acquire(blocking=False):
            try:
                self.copy.upload(with_checkpoints=False)
            finally:
                self._lock.release()

    def _repeat(self, action: Callable[[], object]) -> None:
        while not self._is_ending.wait(lease_seconds() / lease.RENEWALS):
            try:
                action()
            except StorageError as error:
                self.error = error
                return

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._is_ending.set()
        try:
            is_lost = isinstance(error, StorageError)
            if not is_lost and (self.copy.folder / "run.json").exists():
                self.upload()
        except StorageError:
            # The error that ended the run is more informative.
            if error is None:
                raise
        finally:
            for thread in self._threads:
                thread.join()


_sessions: dict[Path, _Session] = {}


def _refresh(folder: Path) -> None:
    """Make a local copy match its bucket.

    If a process on this machine is training a run, the run's copy is newer than the bucket and is
    not changed.
    """
    url = find_url(folder)
    assert url is not None  # noqa: S101 (the only caller passes a local copy)
    with _exclusive():
        live = list(_live_folders())
        if not any(folder.is_relative_to(other) for other in live):
            nested = [other for other in live if other.is_relative_to(folder)]
            _Copy(folder, Bucket(url)).download(nested)


def _root() -> Path:
    root = cache_folder(ROOT).absolute()
    for scheme in ("gs", "s3"):
        PATHS_SHOWN_AS[f"{root}/{scheme}/"] = f"{scheme}://"
    return root


def _state(folder: Path, suffix: str) -> Path:
    """Return the path to a file that records the state or the trainer of a local copy."""
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return cache_folder("remote-state") / f"{key}.{suffix}"


def _exclusive() -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time refresh local copies or start training one."""
    return exclusive(cache_folder("remote-state") / "refresh", lambda: None)


def _live_folders() -> Iterator[Path]:
    """Yield the local copies that processes on this machine are training."""
    for path in cache_folder("remote-state").glob("*.lock"):
        with path.open("r", encoding="utf-8") as lock:
            if not try_lock(lock, shared=True):
                yield Path(lock.read())


def _machine() -> str:
    """Return a random name that identifies this cache, which only processes on this machine use."""
    path = cache_folder("remote-state") / "machine"
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(secrets.token_hex(8))
    return path.read_text("utf-8")


def _safe(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the objects whose names are paths to files that a run can contain."""
    return {name: entry for name, entry in entries.items() if _is_synchronized(name)}


def _is_synchronized(name: str) -> bool:
    parts = name.split("/")
    # The logs of a sweep stay on the machine that writes them.
    is_own = parts[-1] != "lock" and not name.endswith(".log") and lease.FOLDER not in parts
    return is_own and not any(part in ("", "..") or is_stray(part) for part in parts)


def _complete_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the objects, except for those in incomplete checkpoints."""
    matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in entries}
    return {
        name: entry
        for name, entry in entries.items()
        if (match := matches[name]) is None or f"{match[1]}/{SUMS}" in entries
    }


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_stray(name))
        for name in names:
            relative = (Path(parent) / name).relative_to(folder).as_posix()
            if _is_synchronized(relative):
                yield relative


def _stamp(path: Path) -> Stamp | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return None


def _read(path: Path) -> bytes | None:
    """Return the contents of a file, or None if it was deleted in the meantime."""
    with contextlib.suppress(FileNotFoundError):
        return read_limited(path, 1 << 40)
    return None


def _digest(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def _union(old: bytes, new: bytes) -> bytes:
    lines = dict.fromkeys([*old.splitlines(), *new.splitlines()])
    return b"".join(line + b"\n" for line in lines)


def _each(names: Iterable[str], action: Callable[[str], object]) -> None:
    """Apply an action to each name in several threads, and raise the first error."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(action, names):
            pass
