"""Test that the launcher starts each unfinished run once, even if other runs fail.

Small programs stand in for the workers. `tests/integration/test_sweeps.py` tests real workers.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from example_configs import SMALL
from run_files import set_status

from transformer_jax.compilation.shapes import prepare_shapes
from transformer_jax.config import Row
from transformer_jax.distributed.supervisor import module_command
from transformer_jax.errors import RunInterrupted
from transformer_jax.progress import Note
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.sweeps import launch as launcher
from transformer_jax.sweeps.estimates import estimate_memory
from transformer_jax.sweeps.launch import launch
from transformer_jax.sweeps.plan import Sweep, plan_sweep
from transformer_jax.sweeps.slots import Slot
from transformer_jax.sweeps.status import CORES_VARIABLE, read_status

SLOTS = [Slot("cpu 0", cores=frozenset({0})), Slot("cpu 1", {"DEVICE": "1"})]
# This program mimics a worker: it writes the status of a run, unless it is killed first.
WORKER = """
import json, os, signal, sys, time
folder, names = sys.argv[1:3]
name = names.split(",")[0]
def write(status, **details):
    for name in names.split(","):
        write_one(name, status, **details)
def write_one(name, status, **details):
    defaults = {"slot": os.environ["TRANSFORMER_JAX_SLOT"], "host": os.uname().nodename}
    defaults |= {"pid": os.getpid(), "cores": os.environ.get("TRANSFORMER_JAX_CORES")}
    details = defaults | details
    with open(f"{folder}/{name}.state", "w") as file:
        json.dump({"status": status, **details}, file)
def save(*_):
    write("stopped", note="saved")
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print("output of", name, flush=True)
mode = "done" if os.path.exists(f"{folder}/mended") else name.split("/")[0]
if mode == "fails":
    write("failed", note="diverged")
    sys.exit(70)
if mode == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "late":
    # The status names another living process, the launcher.
    write("running", pid=os.getppid())
    sys.exit(75)
if mode == "waits":
    write("running")
    time.sleep(600)
if mode == "ignores":
    os.kill(os.getpid(), signal.SIGUSR2)
write("done")
"""


def make_sweep(path: Path, *rows: str, seeds: int = 1) -> Sweep:
    sweep = plan_sweep(path / "s", {name: Row(SMALL) for name in rows}, seeds)
    sweep.store()
    return sweep


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher start a small program instead of a real worker."""
    monkeypatch.setattr(
        launcher, "module_command", lambda arguments, _: [sys.executable, "-c", WORKER, *arguments]
    )
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)


def test_a_failed_run_does_not_affect_the_others(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "works", "fails", "dies", "ignores")
    lines: list[str] = []
    statuses = {s.run.row: s for s in launch(sweep, SLOTS, lines.append)}
    assert {row: status.status for row, status in statuses.items()} == {
        "works": "done",
        "fails": "failed",
        "dies": "failed",
        # Slurm sends SIGUSR2 to every process, and a worker must survive this signal.
        "ignores": "done",
    }
    assert "its worker exited with code -9: see " in statuses["dies"].note
    assert statuses["works"].run.log_file.read_text() == "output of works/seed-0\n"
    assert any(line.startswith("works/seed-0: on cpu ") for line in lines)
    assert "fails/seed-0: failed: diverged" in lines


def test_only_failed_runs_are_repeated_and_only_on_request(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "works", "fails")
    launch(sweep, SLOTS, lambda _: None)
    contents = [run.status_file.read_text() for run in sweep.runs]
    (sweep.path / "mended").touch()
    launch(sweep, SLOTS, lambda _: None)
    assert contents == [run.status_file.read_text() for run in sweep.runs]
    works, fails = launch(sweep, SLOTS, lambda _: None, retry_failed=True)
    assert (works.status, fails.status) == ("done", "done")
    assert works.run.status_file.read_text() == contents[0]


def test_a_worker_trains_several_seeds_of_a_row(tmp_path: Path) -> None:
    rows = {"works": Row(SMALL), "fails": Row(SMALL.change(model={"d_ff": 8}))}
    sweep = plan_sweep(tmp_path / "s", rows, 3)
    sweep.store()
    lines: list[str] = []
    sizes = {"works": 2, "fails": 8}
    statuses = launch(sweep, SLOTS[:1], lines.append, group_sizes=sizes)
    assert [line for line in lines if line.endswith("on cpu 0")] == [
        "works/seed-0, works/seed-1: on cpu 0",
        "fails/seed-0, fails/seed-1, fails/seed-2: on cpu 0",
        "works/seed-2: on cpu 0",
    ]
    assert {(s.run.row, s.status) for s in statuses} == {("works", "done"), ("fails", "failed")}
    assert "fails/seed-2: failed: diverged" in lines


def test_only_untrained_runs_that_differ_in_seed_and_numbers_train_together(tmp_path: Path) -> None:
    rows = {"base": Row(SMALL), "pmap": Row(SMALL.change(train={"parallelism": "pmap"}))}
    rows["D2"] = Row(SMALL.change(model={"dropout": 0.2}, train={"label_smoothing": 0.2}))
    # Clipping adds an operation to the program.
    rows["clipped"] = Row(SMALL.change(train={"clip_norm": 1.0}))
    # The warmup of the long schedule has more steps than the short schedule.
    for name, steps in (("long", 1000), ("short", 400)):
        schedule = {"schedule": "cosine", "steps": steps, "warmup_steps": steps // 2}
        rows[name] = Row(SMALL.change(train=schedule))
    sweep = plan_sweep(tmp_path / "s", {**rows, "other": Row(SMALL.change(model={"d_ff": 8}))}, 2)
    sweep.store()
    first, second = (sweep.find(f"base/seed-{seed}") for seed in (0, 1))
    assert launcher.can_train_together(first, second)
    assert launcher.can_train_together(first, sweep.find("D2/seed-1"))
    assert not launcher.can_train_together(first, sweep.find("clipped/seed-1"))
    assert not launcher.can_train_together(first, sweep.find("other/seed-1"))
    assert not launcher.can_train_together(sweep.find("long/seed-0"), sweep.find("short/seed-0"))
    assert not launcher.can_train_together(*(sweep.find(f"pmap/seed-{seed}") for seed in (0, 1)))
    second.path.mkdir(parents=True)
    set_status(second, "stopped", finished=["train"])
    assert not launcher.can_train_together(first, second)


@pytest.mark.slow
def test_the_size_of_a_group_depends_on_the_memory_and_the_number_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "module_command", module_command)
    sweep = make_sweep(tmp_path, "works", seeds=3)
    size = estimate_memory(*prepare_shapes(SMALL)[:2])
    # The estimates do not depend on the memory and the slots, so one child process computes them.
    run, children = subprocess.run, list[Any]()

    def run_once(command: list[str], **options: Any) -> Any:
        if not children:
            children.append(run(command, **options))
        return children[0]

    monkeypatch.setattr(subprocess, "run", run_once)

    def choose(num_slots: int, memory: int | None) -> dict[str, int]:
        return launcher.choose_group_sizes(sweep, [Slot("gpu 0", memory=memory)] * num_slots)

    assert choose(1, 100 * size) == {"works": 3}
    assert choose(1, 2 * size) == {"works": 2}
    assert choose(1, size // 2) == {"works": 1}
    assert choose(2, 100 * size) == {"works": 2}
    # With as many slots as runs, each run has its own slot.
    assert choose(3, 100 * size) == choose(1, None) == {}


def test_a_missing_estimate_of_the_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('Traceback\\nKeyError: 1')"]
    monkeypatch.setattr(launcher, "module_command", lambda *_: command)
    sweep = make_sweep(tmp_path, "works", seeds=3)
    with pytest.warns(Note, match="trains one run, because .* not be estimated: KeyError: 1"):
        assert launcher.choose_group_sizes(sweep, [Slot("gpu 0", memory=10**9)]) == {}


@pytest.mark.parametrize("before", ["stopped", "failed"])
def test_the_status_of_an_earlier_attempt_does_not_hide_a_crash(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    sweep = make_sweep(tmp_path, "dies")
    set_status(sweep.runs[0], before, note="saved")
    [status] = launch(sweep, SLOTS[:1], lambda _: None, retry_failed=True)
    assert status.status == "failed"
    assert status.note.startswith("its worker exited with code -9: see ")
    # The job is that of the launcher's allocation, so `slurm.submit` must not wait for it.
    assert status.job == ""


def test_runs_of_other_launchers_are_left_alone(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "works", "submitted", "elsewhere")
    set_status(sweep.runs[1], "submitted", job="7_0")
    set_status(sweep.runs[2], "running", host="another machine", time=time.time())
    statuses = launch(sweep, SLOTS[:1], lambda _: None)
    assert [status.status for status in statuses] == ["done", "submitted", "running"]


def test_a_worker_has_the_device_and_cores_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CORES_VARIABLE, raising=False)
    sweep = make_sweep(tmp_path, "works")
    launch(sweep, SLOTS[:1], lambda _: None)
    assert '"cores": "0"' in sweep.runs[0].status_file.read_text()


def test_a_signal_stops_all_workers_after_they_save(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "waits", "works", seeds=2)
    waiting = sweep.find("waits/seed-0")

    def interrupt() -> None:
        while read_status(waiting).status != "running":
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunInterrupted, match="SIGTERM: all runs are saved; run the same command"):
        launch(sweep, SLOTS[:1], lambda _: None)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert (read_status(waiting).status, read_status(waiting).note) == ("stopped", "saved")
    assert read_status(sweep.find("works/seed-1")).status == "queued"


def test_nohup_lets_a_sweep_survive_the_end_of_its_terminal(tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        [status] = launch(
            make_sweep(tmp_path, "works"), SLOTS[:1], lambda _: signal.raise_signal(signal.SIGHUP)
        )
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert status.status == "done"


def test_a_worker_of_a_killed_launcher_keeps_its_slot_until_it_ends(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "waits", "works")
    orphan = launcher.start_worker(sweep, sweep.runs[:1], SLOTS[0], 60.0)
    while read_status(sweep.runs[0]).status != "running":
        time.sleep(0.02)
    (sweep.path / "mended").touch()
    events: list[str] = []
    threading.Timer(0.5, lambda: (events.append("orphan ends"), orphan.terminate())).start()
    reaper = threading.Thread(target=orphan.wait)
    reaper.start()
    launch(sweep, SLOTS[:1], events.append)
    reaper.join()
    assert events[:3] == [
        "waits/seed-0: waiting, because it is already being trained by another process",
        "orphan ends",
        "works/seed-0: on cpu 0",
    ]
    # The orphaned worker stopped after this launcher started, so this launcher resumes its run.
    assert "waits/seed-0: on cpu 0" in events
    assert [read_status(run).status for run in sweep.runs] == ["done", "done"]


def test_the_slot_of_an_orphaned_group_is_free_when_its_last_run_ends(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "waits", seeds=2)
    details = {"host": socket.gethostname(), "pid": os.getpid(), "slot": SLOTS[0].name}
    for run in sweep.runs:
        set_status(run, "running", **details)
    pool = launcher._Pool(sweep, SLOTS, 60.0)
    assert pool.free == SLOTS[1:]
    for run, free in zip(reversed(sweep.runs), (SLOTS[1:], SLOTS[::-1]), strict=True):
        set_status(run, "done", finished=["train"])
        pool.remove_ended()
        assert pool.free == free


def test_a_launcher_waits_for_a_run_that_another_launcher_has_just_started(tmp_path: Path) -> None:
    """Both launchers read the run's status before either of them starts the run."""
    sweep = make_sweep(tmp_path, "waits")
    [run] = sweep.runs
    events: list[str] = []
    queue = launcher._Queue(sweep, events.append, retry_failed=False)
    set_status(run, "running", host=socket.gethostname(), pid=os.getpid(), slot="cpu 0")
    assert queue.pop() is None
    assert events == [
        "waits/seed-0: waiting, because it is already being trained by another process"
    ]
    assert queue, "the launcher must not exit while the run is being trained"
    set_status(run, "stopped")
    assert queue.pop() == run
    assert not queue


def test_a_launcher_waits_for_a_run_if_another_worker_was_faster(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "late")
    events: list[str] = []

    def report(line: str) -> None:
        events.append(line)
        if "waiting" in line:
            set_status(sweep.runs[0], "done")

    launch(sweep, SLOTS[:1], report)
    assert events == [
        "late/seed-0: on cpu 0",
        "late/seed-0: waiting, because it is already being trained by another process",
    ]


def test_a_run_is_not_resumed_while_its_old_trainer_still_saves(tmp_path: Path) -> None:
    """The worker was killed, so the run counts as stopped, but its trainer still holds the lock."""
    sweep = make_sweep(tmp_path, "saves", "works")
    set_status(sweep.runs[0], "stopped")
    sweep.runs[0].path.mkdir(parents=True)
    events: list[str] = []
    with contextlib.ExitStack() as lock:
        lock.enter_context(exclusive_lock(sweep.runs[0].path))

        def report(line: str) -> None:
            events.append(line)
            if line.startswith("works/seed-0: done"):
                events.append("trainer ends")
                lock.close()

        launch(sweep, SLOTS[:1], report)
    holder = f"being trained by process {os.getpid()} on {socket.gethostname()}, started 0 min"
    assert events[0].startswith(f"saves/seed-0: waiting, because it is already {holder}")
    assert [line.split(", pe")[0] for line in events[1:]] == [
        *("works/seed-0: on cpu 0", "works/seed-0: done", "trainer ends"),
        *("saves/seed-0: on cpu 0", "saves/seed-0: done"),
    ]


def test_the_launcher_does_not_import_jax() -> None:
    code = "import sys, transformer_jax.sweeps.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
