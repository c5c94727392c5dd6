from pathlib import Path

import pytest

from transformer_jax.errors import (
    LostProcessError,
    RunInterrupted,
    StorageError,
    UsageError,
    is_lost_peer,
)

GONE = RuntimeError("Gloo all-reduce failed: Connection reset by peer")


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GONE, True),
        (caused_by(StorageError("checkpoint 8 could not be written"), GONE), True),
        (caused_by(StorageError("8"), caused_by(ValueError("the save failed"), GONE)), True),
        # Orbax raises this error if another process has died.
        (caused_by(StorageError("8"), TimeoutError("Timeout waiting at barrier 'save'.")), True),
        (caused_by(StorageError("8"), TimeoutError(110, "timed out", "runs/barrier")), False),
        (ValueError("a bug"), False),
        # A path may contain a word that also occurs in communication errors, such as "barrier".
        (UsageError("runs/barrier already exists"), False),
        (StorageError("runs/NCCL is not writable"), False),
        (caused_by(StorageError("x"), OSError(28, "No space left", "runs/heartbeat")), False),
        (RunInterrupted("SIGTERM: resume with `transformer-jax resume runs/Gloo`"), False),
        (LostProcessError("process 1 of this run was lost", Path("runs/barrier")), False),
    ],
)
def test_only_errors_of_libraries_show_that_another_process_is_gone(
    error: BaseException, expected: bool
) -> None:
    assert is_lost_peer(error) is expected
