"""Hold the lease of a run or a sweep in a bucket, and upload runs in the background.

While this process trains a run, `commit` uploads each of its checkpoints.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import exclusive, try_lock
from transformer_jax.remote import lease
from transformer_jax.remote.buckets import Bucket
from transformer_jax.remote.copies import (
    exclusive_refresh,
    find_url,
    live_paths,
    machine,
    mark_live,
    refresh,
    state_file,
)
from transformer_jax.remote.lease import Lease
from transformer_jax.remote.transfer import Copy


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
    with state_file(folder, "lock").open("a+", encoding="utf-8") as lock:
        with exclusive_refresh():
            if not try_lock(lock):
                message = f"{folder} is being trained by another process on this machine"
                raise UsageError(message)
            # Other processes are uploading these files.
            live = [x for x in live_paths() if x != folder and x.is_relative_to(folder)]
            mark_live(lock, [folder])
        with Lease(url, machine()) as held:
            copy = Copy(folder, Bucket(url), state_file(folder, "json"))
            copy.download(live)
            _sessions[folder] = session = _Session(copy, held)
            try:
                with session:
                    yield
            finally:
                del _sessions[folder]


@contextlib.contextmanager
def planning(folder: Path) -> Iterator[None]:
    """Hold the lease of a sweep in a bucket, and refresh its copy, so that its plan can change.

    If another machine holds the lease, wait until it is released or expires. For a local sweep, do
    nothing.
    """
    url = find_url(folder)
    if url is None:
        yield
        return
    # Any process on this machine can take over the machine's lease, so a lock is also necessary.
    with exclusive(state_file(folder, "plan")), Lease(url, machine(), waits=True) as held:
        refresh(folder)
        # If the lease expired during the refresh, another machine may now hold it.
        held.renew()
        yield


def is_training(folder: Path) -> bool:
    """Return whether a process that uses this cache is training a run; always true for local runs.

    All processes that train a run in a bucket must work on the files in the same cache.
    """
    if find_url(folder) is None:
        return True
    with exclusive_refresh():
        return folder in set(live_paths())


def commit(folder: Path) -> None:
    """Upload the changes to a run that this process is training. For other runs, do nothing.

    Raises:
        StorageError: the bucket cannot be written, or another process has taken the lease.
    """
    if (session := _sessions.get(folder)) is not None:
        session.upload()


def check(folder: Path) -> None:
    """Raise the StorageError from a background upload or lease renewal, if one has failed."""
    if (session := _sessions.get(folder)) is not None:
        session.check()


def has_failed(folder: Path) -> bool:
    """Return whether `check` raises an error."""
    session = _sessions.get(folder)
    return session is not None and session.error is not None


class _Session:
    """Uploads a run in the background and renews its lease while this process trains the run."""

    def __init__(self, copy: Copy, held: Lease) -> None:
        self.copy, self._lease = copy, held
        self.error: StorageError | None = None
        self._lock, self._is_ending = threading.Lock(), threading.Event()
        actions = held.renew, self._upload_reports
        self._threads = [
            threading.Thread(target=self._repeat, args=(action,), daemon=True) for action in actions
        ]

    def upload(self) -> None:
        """Upload everything while the lease is valid."""
        with self._lock:
            self._keep_lease()
            self.copy.upload()

    def check(self) -> None:
        """Raise the error from an earlier upload or lease renewal, if one has failed."""
        if self.error is not None:
            raise self.error

    def _keep_lease(self) -> None:
        self.check()
        self._lease.renew()

    def _upload_reports(self) -> None:
        # An upload of a checkpoint includes the reports, so this method does not wait for it.
        if self._lock.acquire(blocking=False):
            try:
                self._keep_lease()
                self.copy.upload(with_checkpoints=False)
            finally:
                self._lock.release()

    def _repeat(self, action: Callable[[], object]) -> None:
        while not self._is_ending.wait(self._lease.seconds / lease.RENEWALS):
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
