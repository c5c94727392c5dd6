# ruff: noqa: T201
"""Run commands in forks of a process that has already imported the package.

`python zygote.py` reads one JSON request per line from standard input. Given a command line, it
forks a child and replies with the child's process ID. Given a process ID, it waits for that child
and replies with its exit code. A forked process does not have to import anything, so a test can
quickly start and kill many processes.
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

import jax

# Import the modules that a child process needs, without initializing devices or starting threads.
import transformer_jax.training.loop  # noqa: F401
from transformer_jax import progress
from transformer_jax.cli import main
from transformer_jax.runs import array_store, checksums
from transformer_jax.training import evaluation


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_before(owner: Any, name: str, argument: str = "", count: int = 2) -> None:
    """Kill this process before the `count`-th call to `name` whose arguments contain `argument`."""
    _intercept(owner, name, argument, count, lambda call: (die(), call()))


def die_after(owner: Any, name: str, argument: str = "", count: int = 2) -> None:
    """Kill this process after the `count`-th call to `name` whose arguments contain `argument`."""
    _intercept(owner, name, argument, count, lambda call: (call(), die()))


def _intercept(
    owner: Any, name: str, argument: str, count: int, run: Callable[[Callable[[], Any]], Any]
) -> None:
    function, num_calls = getattr(owner, name), [0]

    def intercepted(*arguments: Any, **options: Any) -> Any:
        is_match = argument in str(arguments)
        num_calls[0] += is_match
        if is_match and num_calls[0] == count:
            return run(lambda: function(*arguments, **options))
        return function(*arguments, **options)

    setattr(owner, name, intercepted)


# The process dies while saving the second checkpoint or removing the first one.
MOMENTS: dict[str, Callable[[], None]] = {
    "before a save": lambda: die_before(array_store.ocp, "save_checkpointables_async"),
    "after a save has begun": lambda: die_after(array_store.ocp, "save_checkpointables_async"),
    "after the arrays are written": lambda: die_before(Path, "replace", "checkpoint.json"),
    "before the checksums": lambda: die_before(checksums, "write"),
    "while the checksums are written": lambda: die_before(Path, "replace", checksums.NAME),
    "after the checksums": lambda: die_after(checksums, "write"),
    "before the rename": lambda: die_before(Path, "rename", "checkpoints/."),
    "after the rename": lambda: die_after(Path, "rename", "checkpoints/."),
    "during an evaluation": lambda: die_before(evaluation, "perplexity", count=1),
    "before the score is recorded": lambda: die_before(checksums, "replace", count=1),
    "while the score is recorded": lambda: die_before(Path, "replace", ".20.checkpoint.json", 1),
    "before the checksum of the score": lambda: die_after(
        Path, "replace", ".20.checkpoint.json", 1
    ),
    "before the old checkpoint is removed": lambda: die_before(shutil, "rmtree", ".old-", 1),
    "while the old checkpoint is removed": lambda: die_before(os, "rmdir", "params", 1),
}


def interrupt_evaluation() -> None:
    """Let this process receive SIGTERM after the first batch of its first evaluation."""
    advance, done = progress.advance, [0]

    def advance_and_signal(count: int) -> None:
        done[0] += count
        if count and done[0] == count:
            signal.raise_signal(signal.SIGTERM)
        advance(count)

    progress.advance = advance_and_signal


def run(
    arguments: list[str],
    log: str,
    *,
    output: str | None = None,
    folder: str = ".",
    programs: str | None = None,
    num_devices: int = 1,
    die: str | None = None,
) -> int:
    """Run a command line in this process and return its exit code.

    Args:
        arguments: the command line.
        log: the file that receives standard error.
        output: the file that receives standard output; defaults to `log`.
        folder: the working directory of the command.
        programs: the folder of the compilation cache; defaults to the test cache.
        num_devices: the number of simulated devices.
        die: the moment at which the process kills itself (one of `MOMENTS`), or "SIGTERM" for
            `interrupt_evaluation`.
    """
    for source, target in ((os.devnull, 0), (output or log, 1), (log, 2)):
        os.dup2(os.open(source, os.O_RDWR | os.O_CREAT | os.O_APPEND), target)
    os.chdir(folder)
    if programs is not None:
        jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_num_cpu_devices", num_devices)
    if die is not None:
        MOMENTS.get(die, interrupt_evaluation)()
    return main(arguments)


def serve() -> None:
    """Handle requests until standard input is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            os._exit(run(**request))


if __name__ == "__main__":
    serve()
