import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs.lock import describe_holder, exclusive_lock

HOLD = """
import sys, time
from pathlib import Path
from transformer_jax.runs.lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def start_holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks a run, wait until it holds the lock, and finally kill it."""
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_the_error_names_the_holder_and_a_killed_holder_releases_the_lock(tmp_path: Path) -> None:
    with start_holder(tmp_path) as first:
        for _ in range(3):
            with pytest.raises(UsageError) as caught, exclusive_lock(tmp_path):
                pass
            assert f"{tmp_path} is being trained by process {first.pid} on " in str(caught.value)
            assert "started 0 min" in str(caught.value)
        first.send_signal(signal.SIGKILL)
        first.wait()
        with exclusive_lock(tmp_path):
            pass


def test_the_age_is_in_hours_and_an_invalid_file_is_tolerated(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        for content, message in (
            (
                json.dumps({"pid": 7, "host": "x", "since": 0}),
                r"process 7 on x, started \d+ h \d+ min ago",
            ),
            ("", "by a process that has just started"),
            ("0" * 10**7, "by a process that has just started"),
            ("[" * 4000, "by a process that has just started"),
            ('{"pid": 7, "host": "x", "since": Infinity}', "by a process that has just started"),
            ('{"pid": "seven"', "by a process that has just started"),
        ):
            (tmp_path / "lock").write_text(content)
            with pytest.raises(UsageError, match=message), exclusive_lock(tmp_path):
                pass


def test_asking_who_holds_the_lock_never_prevents_training(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        assert "by process" in describe_holder(tmp_path)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            describe_holder(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(ask) for _ in range(2)]
        try:
            for _ in range(200):
                with exclusive_lock(tmp_path):
                    pass
        finally:
            is_over.set()
        assert [reader.result() for reader in readers] == [None, None]


def test_asking_who_holds_the_lock_does_not_wait_for_another_reader(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        pass
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert describe_holder(tmp_path) == ""


def test_one_of_many_simultaneous_starts_gets_the_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    start, end = threading.Barrier(8), threading.Barrier(8)

    def try_to_lock() -> bool:
        start.wait()
        try:
            with exclusive_lock(tmp_path):
                end.wait()
                return True
        except UsageError:
            end.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(try_to_lock) for _ in range(8)]]
    assert sum(results) == 1


def test_a_run_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageError, match="is not a regular file"), exclusive_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_: object, __: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    message = f"^{tmp_path} cannot be locked: Function not implemented$"
    with pytest.raises(StorageError, match=message), exclusive_lock(tmp_path):
        pass


def test_the_lock_can_be_taken_again_after_its_release(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive_lock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] > 0


def test_deleting_the_lock_does_not_let_a_second_trainer_in(tmp_path: Path) -> None:
    with start_holder(tmp_path) as first:
        (tmp_path / "lock").unlink()
        with pytest.raises(UsageError, match="its lock was deleted"), exclusive_lock(tmp_path):
            pass
        first.kill()
    with exclusive_lock(tmp_path):
        pass


def test_a_lock_that_is_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert describe_holder(tmp_path) == ""
    with pytest.raises(StorageError, match="not a regular file"), exclusive_lock(tmp_path):
        pass
