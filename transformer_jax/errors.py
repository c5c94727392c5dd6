"""Errors that end a command with a one-line message and an exit code.

Each message states what the problem is, where it occurred, and how to fix it. The exit codes come
from BSD's sysexits.h (`os.EX_*`), except for 1 (failure) and 2 (usage), which follow shell
conventions.
"""

import contextlib
import errno
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

PATHS_SHOWN_AS: dict[str, str] = {}
"""Maps the first part of a local copy's path to the URL that messages show instead."""


def show_paths(text: str) -> str:
    """Return text for the user, with the paths of local copies replaced by URLs."""
    for path, url in PATHS_SHOWN_AS.items():
        text = text.replace(path, url)
    return text


@dataclass(frozen=True)
class Setting:
    """An argument that an error message recommends, such as `average_checkpoints=1` in Python."""

    name: str
    value: object
    argument: str = ""
    """The argument's name in Python, if it is not the name of the option."""

    def __str__(self) -> str:
        return f"{self.argument or self.name}={self.value!r}"


class TransformerJaxError(Exception):
    """Base class for errors that end a command with a one-line message and an exit code.

    `str` formats the settings in the message as Python arguments, and `console.format_for_shell`
    formats them as command-line options.
    """

    exit_code = 1

    def __init__(self, *parts: str | Setting) -> None:
        self.parts = tuple(map(_show_part, parts))
        super().__init__("".join(map(str, self.parts)))


def _show_part(part: str | Setting) -> str | Setting:
    if isinstance(part, str):
        return show_paths(part)
    return replace(part, value=show_paths(part.value)) if isinstance(part.value, str) else part


class UsageError(TransformerJaxError):
    """The arguments to a command or a function are invalid."""

    exit_code = 2


class ConfigError(UsageError):
    """A config is invalid."""

    @classmethod
    def from_field(cls, field: str, rule: str, value: object, advice: str = "") -> Self:
        """Return an error for an invalid field value. The message ends with `advice`."""
        return cls(f"{field} must be {rule}, got {value!r}{advice}")


class SweepFailedError(TransformerJaxError):
    """Some runs in a sweep failed."""


class NotReproducedError(TransformerJaxError):
    """Retraining a run produced different parameters. The message lists possible reasons."""


class VerificationFailedError(TransformerJaxError):
    """An exported model's translations or scores differ too much from those of the run's model."""


class DataError(TransformerJaxError):
    """The text cannot be used, for example because it is not UTF-8."""

    exit_code = os.EX_DATAERR


class ConnectionFailedError(TransformerJaxError):
    """A run's processes could not connect to each other, or Slurm is not available."""

    exit_code = os.EX_UNAVAILABLE


class BackendError(TransformerJaxError):
    """JAX cannot start: its platform does not exist, a flag is unknown, or this is a fork."""

    exit_code = os.EX_UNAVAILABLE


class DivergedError(TransformerJaxError):
    """Training diverged: the loss, the gradient, or the perplexity is not finite."""

    exit_code = os.EX_SOFTWARE


class OutOfMemoryError(TransformerJaxError):
    """A device does not have enough memory for the model and a batch."""

    exit_code = os.EX_OSERR


class StorageError(TransformerJaxError):
    """A file or folder cannot be read or written."""

    exit_code = os.EX_IOERR


@contextlib.contextmanager
def storage_errors(problem: str) -> Iterator[None]:
    """Convert an `OSError` to a `StorageError` whose message begins with `problem`.

    If a file name is too long, raise a `UsageError` instead, because the user chose the name.
    """
    try:
        yield
    except OSError as error:
        kind = UsageError if error.errno == errno.ENAMETOOLONG else StorageError
        raise kind(f"{problem}: {error.strerror or error}") from error


class RunInterrupted(BaseException):
    """A run was interrupted and can be resumed.

    A signal handler can raise this error anywhere in the program. The class does not inherit from
    `Exception`, because some libraries catch every `Exception`.
    """

    exit_code = os.EX_TEMPFAIL


class LostProcessError(TransformerJaxError):
    """One of a run's processes ended or is stuck. The run can be resumed or started again."""

    exit_code = os.EX_TEMPFAIL

    def __init__(self, reason: str, run: Path) -> None:
        self.reason = reason
        if (run / "run.json").exists():
            name = f"./{run}" if str(run).startswith("-") else str(run)
            advice = f"resume with `transformer-jax resume {shlex.quote(name)}`"
        else:
            advice = "the run does not exist yet: run the same command again"
        super().__init__(f"{reason}; {advice}")


def summarize_error(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    if isinstance(error, OSError) and error.strerror:
        return os.strerror(error.errno) if error.errno else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a JAX error means that a device is out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


@contextlib.contextmanager
def memory_errors(*parts: str | Setting) -> Iterator[None]:
    """Convert a JAX out-of-memory error to an `OutOfMemoryError` with the given message."""
    try:
        yield
    # JAX raises RuntimeErrors when a device is out of memory.
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(*parts) from error


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error in a multi-process run means that another process has ended."""
    # Orbax errors are converted to storage errors, so inspect the original error.
    while isinstance(error, StorageError) and error.__cause__ is not None:
        error = error.__cause__
    # If waiting for the other processes fails, Orbax raises a TimeoutError without an errno.
    is_failed_wait = isinstance(error, TimeoutError) and error.errno is None
    # The messages of these errors contain paths and values, which may match the pattern by chance.
    if isinstance(error, TransformerJaxError | RunInterrupted | OSError) and not is_failed_wait:
        return False
    signs = "Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|Connection reset|heartbeat|[bB]arrier"
    return re.search(signs, f"{error} {error.__cause__}") is not None
