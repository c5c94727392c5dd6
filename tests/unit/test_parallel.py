"""Test that results from several processes are in order, and that no process is left behind."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformer_jax.errors import TransformerJaxError
from transformer_jax.parallel import count_usable_cores, map_ahead, map_in_order

NUMBERS, PROCESS = "handlers:open_numbers", "handlers:open_process"


def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended. A process that no parent reaps becomes a zombie."""
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if state.read_text("utf-8").rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still running")


@pytest.mark.parametrize("num_processes", [0, 1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_in_order(num_processes: int) -> None:
    requests = [f" {n}".encode() for n in range(50)]
    expected = [f"no. {n}".encode() for n in range(50)]
    assert list(map_in_order(NUMBERS, b"no. ", requests, num_processes)) == expected


def test_messages_can_be_empty_or_long() -> None:
    setup = bytes(range(256)) * 5000
    assert list(map_in_order(NUMBERS, setup, [b"1"] * 3, 2)) == [setup + b"1"] * 3
    assert list(map_in_order(NUMBERS, b"", [b"0" * 4000 + b"1"], 1)) == [b"1"]


def test_a_thread_computes_the_next_results_ahead_and_ends_with_the_iterator() -> None:
    num_started = threading.Semaphore(0)

    def start(n: int) -> tuple[int, int]:
        num_started.release()
        return n, threading.get_ident()

    results = map_ahead(start, itertools.count(), 2)
    first, thread = next(results)
    assert first == 0
    assert thread != threading.get_ident()
    # The thread computes two more results before they are requested.
    for _ in range(3):
        assert num_started.acquire(timeout=30)
    assert [n for n, _ in itertools.islice(results, 3)] == [1, 2, 3]
    results.close()
    assert list(map_ahead(str, range(5))) == ["0", "1", "2", "3", "4"]
    with pytest.raises(ValueError, match="invalid literal"):
        list(map_ahead(int, ["1", "x"]))


def test_only_a_few_items_are_read_ahead() -> None:
    read: list[bytes] = []

    def requests() -> Iterator[bytes]:
        for n in itertools.count():
            read.append(str(n).encode())
            yield read[-1]

    results = map_in_order(NUMBERS, b"", requests(), 2)
    assert [int(next(results)) for _ in range(10)] == list(range(10))
    results.close()
    assert len(read) <= 10 + 2 * 2


def test_the_processes_do_not_import_jax_and_end_when_the_iterator_is_closed() -> None:
    results = map_in_order(PROCESS, b"", [b"jax", *[b"pid"] * 20], 2)
    assert next(results) == b"False"
    pids = {int(next(results)) for _ in range(10)}
    assert os.getpid() not in pids
    results.close()
    for pid in pids:
        wait_until_ended(pid)


def test_an_error_or_a_killed_process_is_reported_in_one_line() -> None:
    with pytest.raises(TransformerJaxError, match=r"failed: ValueError: invalid .*x'; run the"):
        list(map_in_order(NUMBERS, b"", [b"1", b"x"], 2))
    with pytest.raises(TransformerJaxError, match="failed: it ended with code -9; run the"):
        list(map_in_order(PROCESS, b"", [b"pid", b"die"], 2))


def test_the_processes_end_if_the_process_that_started_them_is_killed() -> None:
    code = f"""
import itertools, sys
sys.path = sys.argv[1:]
from transformer_jax.parallel import map_in_order
for pid in map_in_order({PROCESS!r}, b"", itertools.repeat(b"pid"), 2):
    print(int(pid), flush=True)
"""
    command = [sys.executable, "-c", code, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(10)}
        process.send_signal(signal.SIGKILL)
    for pid in pids:
        wait_until_ended(pid)


def test_the_usable_cores_are_those_that_the_process_may_run_on() -> None:
    code = "from transformer_jax.parallel import *; print(count_usable_cores())"
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"1\n"
    assert count_usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 64),
        ({"job": "max 100000"}, 64),
        ({"job": "250000 100000"}, 3),
        ({"job": "5000 100000"}, 1),
        ({"": "800000 100000", "job/task": "400000 100000"}, 4),
    ],
)
def test_the_usable_cores_respect_the_limits_of_containers(
    tmp_path: Path, limits: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/task\n")
    for group, limit in limits.items():
        folder = tmp_path / "sys" / "fs" / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{limit}\n")
    assert count_usable_cores(tmp_path) == expected
