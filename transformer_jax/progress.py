"""Progress and notes, which code can report regardless of how they are displayed.

Without a reporter, progress has no effect. A reporter receives the progress of the code in the
`with` statement that installs it, but not of other threads. Notes are warnings, so they appear in
notebooks; commands print them as one line.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from transformer_jax.errors import show_paths

Reporter = Callable[[str, int, int], object]
"""A function that receives an activity, the number of finished items, and their total (or 0)."""


@dataclass
class _Task:
    activity: str
    done: int
    total: int


_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)
_task: ContextVar[_Task | None] = ContextVar("task", default=None)

listeners: list[Reporter] = []
"""Functions that receive all progress in this process, in addition to the reporters."""


@contextlib.contextmanager
def report_to(reporter: Reporter) -> Iterator[None]:
    """Send progress to `reporter`, instead of any reporter that is already installed."""
    token = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(token)


def report(activity: str, done: int = 0, total: int = 0) -> None:
    """Report progress; see `Reporter`."""
    for reporter in (*listeners, _reporter.get()):
        if reporter is not None:
            reporter(activity, done, total)


@contextlib.contextmanager
def task(activity: str, total: int, done: int = 0) -> Iterator[None]:
    """Report the start of an activity. Calls to `advance` then add to its progress."""
    token = _task.set(_Task(activity, done, total))
    try:
        advance(0)
        yield
    finally:
        _task.reset(token)


def advance(count: int) -> None:
    """Report that `count` more items of the innermost task, if there is one, are finished."""
    current = _task.get()
    if current is not None:
        current.done += count
        report(current.activity, current.done, current.total)


PACKAGE = __name__.partition(".")[0]


class Note(UserWarning):
    """A warning that contains one line of text for the user."""


def _is_own(frame: FrameType) -> bool:
    # Decorators of `contextlib` call this package's functions. In a script, `__package__` is None.
    package, module = (frame.f_globals.get(key) for key in ("__package__", "__name__"))
    return str(package).startswith(PACKAGE) or module == "contextlib"


def note(text: str) -> None:
    """Issue a `Note` whose location is the line outside this package that called the package."""
    level, frame = 1, sys._getframe()
    while frame is not None and _is_own(frame):
        level, frame = level + 1, frame.f_back
    # Paths can contain bytes that are not UTF-8.
    shown = show_paths(text).encode(errors="backslashreplace").decode()
    warnings.warn(shown, Note, stacklevel=level)
