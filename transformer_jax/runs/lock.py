"""One trainer for a run at a time."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.errors import StorageError, UsageError

NAME = "lock"


@contextlib.contextmanager
def only_trainer(run: Path) -> Iterator[None]:
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{run} is being trained already: {_holder(run)}") from None
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}
        file.truncate(0)
        file.write(json.dumps(holder) + "\n")
        file.flush()
        yield


def _holder(run: Path) -> str:
    """Say who holds a run, and for how long."""
    try:
        holder = json.loads((run / NAME).read_text("utf-8"))
        minutes, seconds = divmod(max(0, round(time.time() - holder["since"])), 60)
        hours, minutes = divmod(minutes, 60)
        age = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"by process {int(holder['pid'])} on {holder['host']!s}, for {age}"
    except (OSError, ValueError, KeyError, TypeError):
        # In the moment between taking the lock and writing the name.
        return "by a process that has just begun"
