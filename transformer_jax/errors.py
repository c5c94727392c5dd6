"""What can go wrong outside the config, each with the exit code that scripts can rely on.

Every one is told in one line: what, where, what to do.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """An argument that avoids an error: `average_checkpoints=1` in Python."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"

    def as_option(self) -> str:
        """Return the setting as the shell takes it: `--average-checkpoints 1`."""
        option = f"--{self.name.replace('_', '-')}"
        return option if self.value is True else f"{option} {shlex.quote(str(self.value))}"


class TransformerJaxError(Exception):
    """Base of the errors that end a command with one line and an exit code.

    The message may contain settings. `str` shows them as Python arguments, and `for_shell` as
    command-line options, so that each reader gets advice that applies.
    """

    exit_code = 1

    def __init__(self, *parts: str | Setting) -> None:
        super().__init__("".join(map(str, parts)))
        self._parts = parts

    def for_shell(self) -> str:
        """Return the message with its settings as command-line options."""
        return "".join(p.as_option() if isinstance(p, Setting) else p for p in self._parts)


class UsageError(TransformerJaxError):
    """A command that cannot be carried out as it was given."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid config: the message names the field, its rule, and the value."""


class SweepFailedError(TransformerJaxError):
    """A sweep of which some runs failed."""


class DataError(TransformerJaxError):
    """Text that cannot be used."""

    exit_code = 65


class ConnectionFailedError(TransformerJaxError):
    """Processes of one run that do not find one another, or a Slurm that is not to be found."""

    exit_code = 69


class DivergedError(TransformerJaxError):
    """A loss that is no finite number."""

    exit_code = 70


class OutOfMemoryError(TransformerJaxError):
    """A device without room for the model and its batch."""

    exit_code = 71


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether this error of JAX's says that a device has no room."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


class StorageError(TransformerJaxError):
    """A file or folder that cannot be read or written."""

    exit_code = 74


class RunInterrupted(BaseException):
    """A run that was asked to stop, and was saved: it can be resumed.

    A signal raises it, in the middle of whatever is done. So it is no `Exception`: a library that
    catches those would take it for a failure of its own.
    """

    exit_code = 75


class LostProcessError(TransformerJaxError):
    """A process of a run that is gone or stuck: the run goes on from its last checkpoint."""

    exit_code = 75

    def __init__(self, what: str, run: Path) -> None:
        if (run / "run.json").exists():
            how = f"go on with `transformer-jax resume {shlex.quote(str(run))}`"
        else:
            how = "there is no run yet: begin again with the same command"
        super().__init__(f"{what}; {how}")


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether this error, of one of several processes, says that another is gone."""
    signs = (
        *("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED"),
        *("Connection reset", "heartbeat", "barrier", "Barrier"),
    )
    return any(sign in str(error) for sign in signs)
