"""Apply a function to many items in order, in several processes or ahead of time in a thread.

The processes do not import JAX. They start as new programs instead of forks, so they inherit no
threads, and they do not run the caller's main module. A process ends when the process that started
it ends, even if that process is killed, because this closes its standard input.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from transformer_jax.errors import TransformerJaxError, summarize_error

Item = TypeVar("Item")
Result = TypeVar("Result")

# The program of a process. Its arguments are the entries of `sys.path`.
PROGRAM = """
import sys
sys.path[:] = sys.argv[1:]
from transformer_jax.data.parallel import serve
serve()
"""


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_processes: int
) -> Generator[Result]:
    """Yield the result for each item, in order. Read only a few items ahead.

    With one process, compute the results in this process. Otherwise, `function` must be picklable.
    Close the iterator to stop the processes early.

    Raises:
        TransformerJaxError: the function failed in another process, or a process was killed.
    """
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max(1, num_processes)))
        # Skip the items that have not started yet, if the caller stops early.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        idle = queue.SimpleQueue[_Process]()
        for _ in range(num_processes if num_processes > 1 else 0):
            # If the system cannot start another process, continue with fewer.
            with contextlib.suppress(OSError):
                idle.put(stack.enter_context(_Process(function)))
        if idle.empty():
            yield from map(function, items)
            return

        def apply(item: Item) -> Result:
            process = idle.get()
            try:
                return process.apply(item)
            finally:
                idle.put(process)

        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(threads.submit(apply, item))
            if len(pending) > 2 * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], num_ahead: int = 2
) -> Generator[Result]:
    """Yield the result for each item, in order, while a thread computes the next results.

    Close the iterator to stop the thread.
    """
    with ThreadPoolExecutor(1) as thread:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(thread.submit(function, item))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


class _Process:
    """A process that applies one function. Exiting the context kills it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        # The command contains only this package's code and the current import path.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C interrupts only the process that uses the results.
            process_group=0,
        )
        self._function: Callable[[Any], Any] | None = function

    def apply(self, item: object) -> Any:  # noqa: ANN401 (the function determines the type)
        """Return the function's result for an item."""
        process, first = self._process, self._function
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        try:
            if first is not None:
                pickle.dump(first, process.stdin)
                self._function = None
            pickle.dump(item, process.stdin)
            process.stdin.flush()
            # The other process runs this package's code, so its answer is safe to load.
            result, problem = pickle.load(process.stdout)  # noqa: S301
        except (OSError, EOFError, pickle.UnpicklingError):
            result, problem = None, f"it ended with code {process.wait()}"
        if problem is not None:
            raise TransformerJaxError(
                f"a process that prepares the text failed: {problem}; run the command again to "
                "continue where it stopped"
            )
        return result

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Data that is still buffered cannot be written to a killed process.
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def serve() -> None:
    """Answer the requests of the process that started this one, until that process ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Libraries that print must not disturb the answers.
    os.dup2(2, 1)
    # A closed pipe means that the results are no longer needed.
    with contextlib.suppress(EOFError, OSError):
        function = pickle.load(requests)  # noqa: S301
        while True:
            item = pickle.load(requests)  # noqa: S301
            try:
                answer = function(item), None
            except Exception as error:  # noqa: BLE001 (the other process reports any error)
                answer = None, f"{type(error).__name__}: {summarize_error(error)}"
            pickle.dump(answer, answers)
            answers.flush()
