"""A lock that lets only one process at a time train a run."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from transformer_jax.errors import StorageError, UsageError, storage_errors
from transformer_jax.files import INVALID_JSON, check_regular, lock_folder, try_lock, unlock

NAME = "lock"
# The lock file may be malicious, so read at most this many characters.
MAX_LENGTH = 4096
# The number of attempts to acquire a lock that only readers hold, and the seconds to wait between
# attempts.
ATTEMPTS, INTERVAL = 100, 0.01


@contextlib.contextmanager
def exclusive_lock(run: Path) -> Iterator[None]:
    """Lock a run for this process. The operating system releases the lock when the process ends.

    Both the file `lock`, which names the process, and the run's folder are locked, because a user
    may delete the file.
    """
    with storage_errors(f"{run} cannot be written"):
        if (run / NAME).exists():
            check_regular(run / NAME)
        file = (run / NAME).open("a+", encoding="utf-8")
    with file, contextlib.ExitStack() as stack:
        with storage_errors(f"{run} cannot be locked"):
            is_locked = _lock_exclusively(file)
        if not is_locked:
            raise UsageError(f"{run} is being trained {_read_holder(file)}")
        if not stack.enter_context(lock_folder(run)):
            raise UsageError(f"{run} is being trained by another process; its lock was deleted")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}
        file.truncate(0)
        file.write(json.dumps(holder) + "\n")
        file.flush()
        yield


def describe_holder(run: Path) -> str:
    """Return "by process 7 on x, started 2 h 5 min ago" if a run is being trained, else ""."""
    try:
        check_regular(run / NAME)
        with (run / NAME).open("r", encoding="utf-8") as file:
            return "" if try_lock(file, shared=True) else _read_holder(file)
    except (OSError, StorageError):
        return ""


def _lock_exclusively(file: IO[str]) -> bool:
    """Try to acquire the exclusive lock. Wait up to a second, but only for readers."""
    for _ in range(ATTEMPTS):
        if try_lock(file):
            return True
        if not try_lock(file, shared=True):
            return False
        # Release the shared lock; otherwise, two processes that start together would block each
        # other.
        unlock(file)
        time.sleep(INTERVAL)
    return False


def _read_holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        holder = json.loads(file.read(MAX_LENGTH))
        minutes, seconds = divmod(max(0, round(time.time() - holder["since"])), 60)
        hours, minutes = divmod(minutes, 60)
        age = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"by process {int(holder['pid'])} on {holder['host']!s}, started {age} ago"
    except (OSError, KeyError, *INVALID_JSON):
        # The holder has acquired the lock but has not written its process ID yet.
        return "by a process that has just started"
