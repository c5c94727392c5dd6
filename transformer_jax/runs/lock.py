"""One trainer for a run at a time."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from transformer_jax.errors import StorageError, UsageError

NAME = "lock"
# Characters: what is longer is none of ours.
MAX_LENGTH = 4096
# How often it is tried to take a lock that others only look at, and seconds between.
TRIES, PAUSE = 100, 0.01


@contextlib.contextmanager
def exclusive_lock(run: Path) -> Iterator[None]:
    """Hold a run for this process alone; whoever dies, however, holds it no more.

    Raises:
        UsageError: another process holds it.
        StorageError: the folder cannot be written.
    """
    try:
        file = (run / NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{run} cannot be written: {error.strerror}") from error
    with file:
        if not _take(file):
            raise UsageError(f"{run} is being trained {_holder(run)}")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}
        file.truncate(0)
        file.write(json.dumps(me) + "\n")
        file.flush()
        yield


def trainer(run: Path) -> str:
    """Return by whom a run is being trained, and for how long; "" if it is not."""
    try:
        with (run / NAME).open("r", encoding="utf-8") as file:
            return "" if _lock(file, fcntl.LOCK_SH) else _holder(run)
    except OSError:
        return ""


def _take(file: IO[str]) -> bool:
    """Take a lock, unless someone holds it; who only looks at it goes in a moment."""
    for _ in range(TRIES):
        if _lock(file, fcntl.LOCK_EX):
            return True
        if not _lock(file, fcntl.LOCK_SH):
            return False
        # Two that begin at once would else keep each other out.
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(PAUSE)
    return False


def _lock(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(run: Path) -> str:
    try:
        with (run / NAME).open(encoding="utf-8") as file:
            holder = json.loads(file.read(MAX_LENGTH))
        minutes, seconds = divmod(max(0, round(time.time() - holder["since"])), 60)
        hours, minutes = divmod(minutes, 60)
        age = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"by process {int(holder['pid'])} on {holder['host']!s}, for {age}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # In the moment between taking the lock and writing the name.
        return "by a process that has just begun"
