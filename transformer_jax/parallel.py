"""Compute results in order, in several processes or ahead of time in a thread.

The processes do not import JAX. The processes are new programs instead of forks, so they do not
inherit threads, and they do not run the caller's main module. The processes exit when the process
that started them ends or is killed, because their standard input is then closed. The processes
exchange bytes, so none of them executes data.
"""

import contextlib
import math
import os
import pkgutil
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TypeVar

from transformer_jax.errors import TransformerJaxError, summarize_error

Item = TypeVar("Item")
Result = TypeVar("Result")

# The program that each process runs. The arguments are the handler and the entries in `sys.path`.
PROGRAM = """
import sys
handler, *sys.path[:] = sys.argv[1:]
from transformer_jax.parallel import serve
serve(handler)
"""


def count_usable_cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    This function respects the CPU limits of containers (see `control_groups`).
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder in control_groups(root):
        # The root control group has no limit, and the limit of any other group can be "max".
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text("utf-8").split())
            count = min(count, max(1, math.ceil(quota / period)))
    return count


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups (version 2), from the innermost outward.

    The folder `root` contains the folders `proc` and `sys`.
    """
    mount = group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text("utf-8")
        group = mount / groups.rpartition("0::/")[2].strip()
    for folder in (group, *group.parents):
        yield folder
        if folder == mount:
            return


def map_in_order(
    handler: str, setup: bytes, requests: Iterable[bytes], num_processes: int
) -> Generator[bytes]:
    """Yield the answer to each request, in order. Read only a few requests ahead.

    `handler` is the name of a function, such as "package.module:function". Each process calls this
    function once with `setup`. The result is the function that answers the requests. Close the
    iterator to stop the processes early.
    """
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max(1, num_processes)))
        # If the caller stops early, skip the requests that have not been sent yet.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        idle = queue.SimpleQueue[_Process]()
        for _ in range(num_processes):
            # If the system cannot start another process, continue with fewer.
            with contextlib.suppress(OSError):
                idle.put(stack.enter_context(_Process(handler, setup)))
        if idle.empty():
            yield from map(pkgutil.resolve_name(handler)(setup), requests)
            return

        def ask(request: bytes) -> bytes:
            process = idle.get()
            try:
                return process.ask(request)
            finally:
                idle.put(process)

        yield from _map_ahead(threads, ask, requests, 2 * num_processes)


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], num_ahead: int = 2
) -> Generator[Result]:
    """Yield the result for each item, in order, while a thread computes the next results."""
    with ThreadPoolExecutor(1) as thread:
        try:
            yield from _map_ahead(thread, function, items, num_ahead)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def _map_ahead(
    threads: ThreadPoolExecutor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_ahead: int,
) -> Generator[Result]:
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(threads.submit(function, item))
        if len(pending) > num_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Process:
    """A process that answers requests with a handler. Exiting the context kills the process."""

    def __init__(self, handler: str, setup: bytes) -> None:
        reader, self._requests = Pipe(duplex=False)
        self._answers, writer = Pipe(duplex=False)
        with reader, writer:
            # The command contains only this package's code and the current import path.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", PROGRAM, handler, *sys.path],
                stdin=reader.fileno(),
                stdout=writer.fileno(),
                stderr=subprocess.DEVNULL,
                # Ctrl-C interrupts only the process that uses the results.
                process_group=0,
            )
        self._setup: bytes | None = setup

    def ask(self, request: bytes) -> bytes:
        """Return the handler's answer to a request."""
        try:
            if self._setup is not None:
                self._requests.send_bytes(self._setup)
                self._setup = None
            self._requests.send_bytes(request)
            problem, answer = self._answers.recv_bytes(), self._answers.recv_bytes()
        except (OSError, EOFError):
            problem, answer = f"it ended with code {self._process.wait()}".encode(), b""
        if problem:
            raise TransformerJaxError(
                f"a process that prepares the text failed: {problem.decode()}; run the command "
                "again to continue where it stopped"
            )
        return answer

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


def serve(handler: str) -> None:
    """Answer the requests from the process that started this one, until that process ends."""
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    # Redirect standard output, because text that a library prints would corrupt the answers.
    os.dup2(2, 1)
    # A closed pipe means that the results are no longer needed.
    with contextlib.suppress(EOFError, OSError):
        answer = pkgutil.resolve_name(handler)(requests.recv_bytes())
        while True:
            request = requests.recv_bytes()
            try:
                messages = b"", answer(request)
            except Exception as error:  # noqa: BLE001 (the other process reports any error)
                messages = f"{type(error).__name__}: {summarize_error(error)}".encode(), b""
            for message in messages:
                answers.send_bytes(message)
