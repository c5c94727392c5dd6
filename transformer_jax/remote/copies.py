"""Local copies of runs in buckets. All processes work on these copies.

The copy of gs://bucket/run is the folder remote/gs/bucket/run in the user's cache. `local_path`
downloads what has changed, except for the arrays in checkpoints, which `repair` downloads when they
are read. `uploading` uploads individual files, `delete` deletes one, and `session.training` uploads
a run that is being trained. All other code uses local paths; messages show URLs instead (see
`errors.PATHS_SHOWN_AS`).
"""

import contextlib
import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from transformer_jax.cache import cache_folder
from transformer_jax.errors import PATHS_SHOWN_AS, UsageError, storage_errors
from transformer_jax.files import exclusive, expand_path, is_stray, try_lock
from transformer_jax.remote.buckets import Bucket
from transformer_jax.remote.transfer import Copy, download_checkpoint, each, list_files

URL = re.compile(r"(gs|s3):(?:/+(.*))?")
ROOT, STATE = "remote", "remote-state"


def local_path(path: str | Path) -> Path:
    """Return a path from the user, or the refreshed local copy of a gs:// or s3:// URL."""
    match = URL.fullmatch(str(path))
    if match is None:
        path = Path(expand_path(str(path)))
        if ROOT in path.parts:
            # The path may be in a local copy, which messages show as a URL.
            _root()
        return path
    parts = PurePosixPath(match[2] or "").parts
    if not parts:
        raise UsageError(
            f"{path} does not name a bucket: use a URL such as {match[1]}://my-bucket/run"
        )
    if any(is_stray(part) for part in parts):
        raise UsageError(f"{match[1]}://{match[2]} contains a name that is not allowed in a run")
    folder = _root().joinpath(match[1], *parts)
    refresh(folder)
    return folder


def find_url(path: Path) -> str | None:
    """Return the URL of a path in a local copy, or None for any other path."""
    # The folder of a scheme, such as remote/gs, contains the copies of all buckets.
    if ROOT not in path.parts or (root := _root()) not in path.parent.parents:
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
    with exclusive_refresh(), storage_errors(f"{folder} cannot be written"):
        bucket = Bucket(path)
        each(names, lambda name: bucket.download(name, folder / name))
    return folder


@contextlib.contextmanager
def uploading(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Upload the files that the body of the `with` statement writes, if `folder` is a local copy.

    Upload scores.json last. Until then, no other process on this machine refreshes these files or
    uploads files of this folder.
    """
    url = find_url(folder)
    if url is None:
        yield
        return
    with exclusive(state_file(folder, "upload.lock")) as lock:
        # Wait for the end of a refresh, which could delete the new files.
        with exclusive_refresh():
            mark_live(lock, [folder / name for name in names])
        yield
        bucket = Bucket(url)
        for is_last in (False, True):
            group = [name for name in names if (name == "scores.json") == is_last]
            each(group, lambda name: bucket.write(name, folder / name))


def delete(path: Path) -> None:
    """Delete a file and, if it is in a local copy, its object."""
    url = find_url(path.parent)
    if url is not None:
        # Delete the object first; otherwise, a refresh could download it again.
        Bucket(url).delete(path.name)
    path.unlink(missing_ok=True)


def repair(checkpoint: Path) -> bool:
    """Download the checkpoint's files that are missing or damaged in the local copy.

    Return whether the folder is a local copy.
    """
    url = find_url(checkpoint)
    if url is None or not checkpoint.is_dir():
        return False
    download_checkpoint(checkpoint, Bucket(url))
    return True


def publish(path: Path) -> None:
    """Upload a folder in a local copy, such as a report."""
    with uploading(path, list(list_files(path))):
        pass


def state_file(folder: Path, suffix: str) -> Path:
    """Return the path of a state file or a lock file for a local copy."""
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return cache_folder(STATE) / f"{key}.{suffix}"


def exclusive_refresh() -> contextlib.AbstractContextManager[object]:
    """Let only one process at a time refresh local copies or mark paths as live."""
    return exclusive(cache_folder(STATE) / "refresh")


def mark_live(lock: IO[str], paths: Iterable[Path]) -> None:
    """Record, in a lock file that this process holds, the paths that this process changes."""
    lock.truncate(0)
    lock.write("\n".join(map(str, paths)))
    lock.flush()


def live_paths() -> Iterator[Path]:
    """Yield the folders and files in local copies that processes on this machine are changing."""
    for path in cache_folder(STATE).glob("*.lock"):
        with path.open("r", encoding="utf-8") as lock:
            if not try_lock(lock, shared=True):
                yield from map(Path, lock.read().splitlines())


def machine() -> str:
    """Return a random ID for this cache. Leases use it to identify this machine."""
    path = cache_folder(STATE) / "machine"
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(secrets.token_hex(8))
    return path.read_text("utf-8")


def refresh(folder: Path) -> None:
    """Make a local copy match its bucket.

    If a process on this machine is training a run, the run's copy is newer than the bucket and is
    not changed.
    """
    url = find_url(folder)
    assert url is not None  # noqa: S101 (all callers pass a local copy)
    with exclusive_refresh():
        live = list(live_paths())
        if not any(folder.is_relative_to(other) for other in live):
            copy = Copy(folder, Bucket(url), state_file(folder, "json"))
            copy.download(other for other in live if other.is_relative_to(folder))


def _root() -> Path:
    root = cache_folder(ROOT).absolute()
    for scheme in ("gs", "s3"):
        PATHS_SHOWN_AS[f"{root}/{scheme}/"] = f"{scheme}://"
    return root
