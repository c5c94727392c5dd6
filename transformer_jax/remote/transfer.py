"""Copy the files of a run or a sweep from a bucket to a local folder, and back in a safe order.

A checkpoint in a bucket without SHA256SUMS counts as incomplete. `Copy.upload` therefore uploads
the metrics, the arrays, and finally SHA256SUMS. When it deletes a checkpoint, it deletes SHA256SUMS
first. `Copy.download` skips the arrays in checkpoints, which `download_checkpoint` downloads when
they are read.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from transformer_jax.errors import storage_errors
from transformer_jax.files import is_stray, read_json_if_valid, read_limited, write_json
from transformer_jax.remote import lease
from transformer_jax.remote.buckets import Bucket, Entry

SUMS, METADATA = "SHA256SUMS", "checkpoint.json"
# A file in a checkpoint. The groups are the checkpoint's folder and the rest of the path.
CHECKPOINT_FILE = re.compile(r"((?:.*/)?checkpoints/[0-9]+)/(.+)")
NUM_THREADS = 8
# A listing can become outdated while its files are downloaded.
MAX_LISTINGS = 5
MAX_REPAIRS = 3
Stamp: TypeAlias = tuple[int, int]
"""The size of a local file and the time of its last change, which identify its contents."""


class Copy:
    """A local copy of a folder in a bucket, with the state of its objects."""

    def __init__(self, folder: Path, bucket: Bucket, state: Path) -> None:
        """Store the arguments. The file `state` records which objects have been downloaded."""
        self.folder, self._bucket, self._state = folder, bucket, state
        # The stamp of each object's local file; None if the file has not been downloaded.
        self._uploaded: dict[str, Stamp | None] = {}

    def download(self, live: Iterable[Path] = ()) -> None:
        """Make the local files match the bucket.

        Do not download the arrays in checkpoints, and do not change the files and folders in
        `live`.
        """
        stored = read_json_if_valid(self._state)
        skipped = tuple(f"{path.relative_to(self.folder).as_posix()}/" for path in live)
        with storage_errors(f"{self.folder} cannot be written"):
            for _ in range(MAX_LISTINGS):
                listed = _complete_entries(_safe(self._bucket.list()))
                entries = {k: v for k, v in listed.items() if not f"{k}/".startswith(skipped)}
                self._remove_others(entries, skipped)
                if not (outdated := self._outdated(entries, stored)):
                    break
                each(outdated, lambda name, found=entries: self._load(name, found[name], stored))
                write_json(self._state, stored)
        self._uploaded = {name: _stamp(self.folder / name) for name in entries}

    def upload(self, *, with_checkpoints: bool = True) -> None:
        """Upload new and changed files, and delete the objects whose files were deleted."""
        stamps = {name: _stamp(self.folder / name) for name in list_files(self.folder)}
        local = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        # `download_checkpoint` has downloaded these files in the meantime.
        self._uploaded |= {k: v for k, v in local.items() if self._uploaded.get(k, v) is None}
        changed = {
            name: stamp for name, stamp in local.items() if self._uploaded.get(name) != stamp
        }
        # Training writes a report before the score in the checkpoint's metadata. Read the metadata
        # first, so that no score is uploaded without its report.
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
        each(arrays, lambda name: self._write(name, self.folder / name, changed[name]))
        if sums in self._uploaded and metadata in kept and sums in kept:
            # Until both files are replaced, list the digests of the old and the new metadata, as
            # `checksums.replace` does.
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
            each(sorted(group), self._bucket.delete)
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
        path, is_in_checkpoint = self.folder / name, CHECKPOINT_FILE.fullmatch(name) is not None
        is_loaded = self._bucket.download(name, path, keeps_damaged=is_in_checkpoint)
        if is_loaded and (stamp := _stamp(path)):
            stored[name] = [entry.version, *stamp]

    def _remove_others(self, entries: Mapping[str, Entry], skipped: tuple[str, ...]) -> None:
        """Remove local files that are not in the bucket, and folders without files.

        Keep the folders of the skipped files, because another process may have just created them.
        """
        kept = {x for name in skipped for x in (self.folder / name, *(self.folder / name).parents)}
        if not entries and not skipped:
            shutil.rmtree(self.folder, ignore_errors=True)
        for name in list(list_files(self.folder)):
            if name not in entries and not f"{name}/".startswith(skipped):
                (self.folder / name).unlink(missing_ok=True)
        for parent, _, _ in os.walk(self.folder, topdown=False):
            if Path(parent) not in kept:
                with contextlib.suppress(OSError):
                    Path(parent).rmdir()


def download_checkpoint(checkpoint: Path, bucket: Bucket) -> None:
    """Download the files of a checkpoint that are missing or damaged in the local copy."""
    with contextlib.suppress(OSError):
        lines = (checkpoint / SUMS).read_text("utf-8", "replace").splitlines()
        listed = {tuple(line.split("  ", 1)[::-1]) for line in lines}
        for _ in range(MAX_REPAIRS):
            names = _safe(bucket.list())
            different = [x for x in names if (x, _digest(checkpoint / x)) not in listed]
            if set(different) <= {SUMS}:
                break
            each(different, lambda x: bucket.download(x, checkpoint / x, keeps_damaged=True))


def list_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files in a local folder that belong in a bucket."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_stray(name))
        for name in names:
            relative = (Path(parent) / name).relative_to(folder).as_posix()
            if _is_synchronized(relative):
                yield relative


def each(names: Iterable[str], action: Callable[[str], object]) -> None:
    """Apply an action to each name in several threads, and raise the first error."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(action, names):
            pass


def _safe(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the objects whose names are paths to files that a run can contain."""
    return {name: entry for name, entry in entries.items() if _is_synchronized(name)}


def _is_synchronized(name: str) -> bool:
    parts = name.split("/")
    # The logs of a sweep stay on the machine that writes them.
    is_own = parts[-1] != "lock" and not name.endswith(".log") and not lease.OBJECT.fullmatch(name)
    return is_own and not any(part in ("", "..") or is_stray(part) for part in parts)


def _complete_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the objects, except for those in incomplete checkpoints."""
    matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in entries}
    return {
        name: entry
        for name, entry in entries.items()
        if (match := matches[name]) is None or f"{match[1]}/{SUMS}" in entries
    }


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
