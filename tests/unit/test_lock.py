"""A run is trained by one process at a time, and whoever dies makes way."""

import fcntl
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs.lock import exclusive_lock, trainer

HOLD = """
import sys, time
from pathlib import Path
from transformer_jax.runs.lock import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder_of(run: Path) -> subprocess.Popen[str]:
    """Start a process that holds a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_holds_the_run_and_a_killed_one_makes_way(tmp_path: Path) -> None:
    with holder_of(tmp_path) as first:
        for _ in range(3):
            with pytest.raises(UsageError) as told, exclusive_lock(tmp_path):
                pass
            assert f"by process {first.pid} on " in str(told.value)
            assert "for 0 min" in str(told.value)
        first.send_signal(signal.SIGKILL)
        first.wait()
        with exclusive_lock(tmp_path):
            pass


def test_the_age_is_told_in_hours_and_whatever_stands_there_is_no_fault(tmp_path: Path) -> None:
    with holder_of(tmp_path) as first:
        for content, told in (
            (json.dumps({"pid": 7, "host": "x", "since": 0}), r"process 7 on x, for \d+ h \d+ min"),
            ("", "by a process that has just begun"),
            ("0" * 10**7, "by a process that has just begun"),
            ("[" * 4000, "by a process that has just begun"),
            ('{"pid": 7, "host": "x", "since": Infinity}', "by a process that has just begun"),
            ('{"pid": "seven"', "by a process that has just begun"),
        ):
            (tmp_path / "lock").write_text(content)
            with pytest.raises(UsageError, match=told), exclusive_lock(tmp_path):
                pass
        first.kill()


def test_looking_who_trains_keeps_no_one_from_training(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        assert "by process" in trainer(tmp_path)
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            trainer(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        lookers = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(200):
                with exclusive_lock(tmp_path):
                    pass
        finally:
            ends.set()
        assert [looker.result() for looker in lookers] == [None, None]


def test_who_looks_waits_for_no_other_who_looks(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        pass
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert trainer(tmp_path) == ""


def test_of_many_that_begin_at_once_one_holds_the_run(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    began, ends = threading.Barrier(8), threading.Barrier(8)

    def begin() -> bool:
        began.wait()
        try:
            with exclusive_lock(tmp_path):
                ends.wait()
                return True
        except UsageError:
            ends.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        held = [f.result() for f in [pool.submit(begin) for _ in range(8)]]
    assert sum(held) == 1


def test_a_run_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageError, match="cannot be written"), exclusive_lock(tmp_path):
        pass


def test_one_after_the_other_may_hold_it(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive_lock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] > 0
