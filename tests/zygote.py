# ruff: noqa: T201
"""Processes that can be killed: each a fork of one that has imported everything already.

`python zygote.py` reads a command line, as JSON, from each line of its standard input, forks a
child that runs it, and answers with the child's process id; `wait ID` is answered with how that
one ended. A start costs no imports, so that a test can kill many.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Whatever a child needs; none of it starts a device, or a thread.
import transformer_jax.training.loop  # noqa: F401
from transformer_jax.cli import main
from transformer_jax.runs import array_store, checksums


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def before(owner: Any, name: str, about: str = "", count: int = 2) -> None:
    """Die when a function is called for the count-th time with `about` in its arguments."""
    _watch(owner, name, about, count, lambda call: (die(), call()))


def after(owner: Any, name: str, about: str = "", count: int = 2) -> None:
    """Die when such a call is over."""
    _watch(owner, name, about, count, lambda call: (call(), die()))


def _watch(
    owner: Any, name: str, about: str, count: int, do: Callable[[Callable[[], Any]], Any]
) -> None:
    function, calls = getattr(owner, name), [0]

    def watched(*arguments: Any, **options: Any) -> Any:
        calls[0] += about in str(arguments)
        if calls[0] == count and about in str(arguments):
            return do(lambda: function(*arguments, **options))
        return function(*arguments, **options)

    setattr(owner, name, watched)


# Moments in the life of a run's second checkpoint, and of the one that makes way for it.
MOMENTS: dict[str, Callable[[], None]] = {
    "before a save": lambda: before(array_store.ocp, "save_checkpointables_async"),
    "when a save has begun": lambda: after(array_store.ocp, "save_checkpointables_async"),
    "when the arrays are written": lambda: before(Path, "write_text", "checkpoint.json"),
    "before the manifest": lambda: before(checksums, "write"),
    "within the manifest": lambda: before(Path, "replace", checksums.NAME),
    "after the manifest": lambda: after(checksums, "write"),
    "before the rename": lambda: before(Path, "rename", "checkpoints/."),
    "after the rename": lambda: after(Path, "rename", "checkpoints/."),
    "before the old one goes": lambda: before(shutil, "rmtree", ".old-", 1),
    "when the old one is half gone": lambda: before(os, "rmdir", "params", 1),
}


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            for source, target in ((os.devnull, 0), (request["log"], 1), (request["log"], 2)):
                os.dup2(os.open(source, os.O_RDWR | os.O_CREAT | os.O_APPEND), target)
            if request.get("die"):
                MOMENTS[request["die"]]()
            os._exit(main(request["arguments"]))


if __name__ == "__main__":
    serve()
