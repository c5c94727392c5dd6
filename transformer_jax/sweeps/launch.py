"""Run a sweep on this machine, with one worker per slot (an accelerator or a set of CPU cores).

A worker trains one run, or a few runs that differ only in their seeds and numeric settings, in one
program. A failed run does not affect the others. This module does not import JAX, which would
reserve device memory that the workers need.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from transformer_jax.distributed.supervisor import module_command
from transformer_jax.errors import ConfigError, RunInterrupted, storage_errors
from transformer_jax.files import read_json_if_valid
from transformer_jax.progress import note
from transformer_jax.runs.lock import describe_holder
from transformer_jax.signals import handle_signals
from transformer_jax.sweeps.plan import NAME_SEPARATOR, Sweep, SweepRun
from transformer_jax.sweeps.slots import Slot
from transformer_jax.sweeps.status import (
    CORES_VARIABLE,
    PROCESS_GONE,
    SLOT_VARIABLE,
    RunStatus,
    last_log_line,
    read_status,
    write_status,
)

POLL_SECONDS = 0.2
# After SIGTERM, a worker must save its progress and exit within this many seconds.
STOP_SECONDS = 120.0
# More runs than this in one program hardly increase the throughput.
MAX_GROUP_SIZE = 16


def launch(
    sweep: Sweep,
    slots: Sequence[Slot],
    report: Callable[[str], None],
    *,
    group_sizes: Mapping[str, int] | None = None,
    retry_failed: bool = False,
    step_timeout: float = 60.0,
) -> list[RunStatus]:
    """Train and score the unfinished runs in a stored sweep; return the status of every run.

    `group_sizes` maps each row to the largest number of runs in a program that trains one of its
    runs; the default is 1. Whenever a run waits, starts, or ends, `report` receives a one-line
    message. A run that another process on this machine is still training waits until that process
    exits. After a signal, the active runs save their progress, and this function raises
    `RunInterrupted`.
    """
    queue = _Queue(sweep, report, retry_failed=retry_failed)
    pool = _Pool(sweep, slots, step_timeout)
    signals: list[int] = []
    with handle_signals(lambda number, _: signals.append(number)):
        try:
            while (queue and not signals) or pool.workers:
                while pool.free and not signals and (runs := queue.pop_group(group_sizes or {})):
                    report(f"{', '.join(run.name for run in runs)}: on {pool.start(runs).name}")
                time.sleep(POLL_SECONDS)
                if signals:
                    pool.stop()
                for runs, worker in pool.remove_ended():
                    for run in runs:
                        status = _settle_status(run, worker, is_stopping=bool(signals))
                        if not queue.defer_if_running(status):
                            report(f"{run.name}: {status.summary}")
        finally:
            pool.stop()
    if signals:
        name = signal.Signals(signals[0]).name
        raise RunInterrupted(
            f"{name}: all runs are saved; run the same command to resume the sweep"
        )
    return [read_status(run) for run in sweep.runs]


def choose_group_sizes(sweep: Sweep, slots: Sequence[Slot]) -> dict[str, int]:
    """Return the largest number of runs in a program that trains a run in each row.

    On accelerators, the result is as large as the memory allows, unless slots would remain unused.
    On CPUs, where larger programs are not faster, the result is empty, which means 1.
    """
    memory = min((slot.memory or 0 for slot in slots), default=0)
    num_unfinished = sum(read_status(run).status != "done" for run in sweep.runs)
    most = min(MAX_GROUP_SIZE, -(-num_unfinished // len(slots)))
    if not memory or most < 2:
        return {}
    # Estimate the memory in a child process, because JAX would reserve the accelerator's memory.
    command = module_command([str(sweep.path)], "transformer_jax.sweeps.estimates")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(command, env=environment, capture_output=True, check=False)  # noqa: S603
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        note(f"each program trains one run, because the memory could not be estimated: {reason}")
        return {}
    needed: dict[str, int] = json.loads(child.stdout.splitlines()[-1])
    return {row: max(1, min(most, memory // size)) for row, size in needed.items()}


class _Queue:
    """The runs that this launcher may still need to train."""

    def __init__(self, sweep: Sweep, report: Callable[[str], None], *, retry_failed: bool) -> None:
        self._report, self._retry_failed = report, retry_failed
        self._reported: set[SweepRun] = set()
        statuses = [read_status(run) for run in sweep.runs]
        self._pending = [s.run for s in statuses if s.needs_worker(retry_failed=retry_failed)]
        # If another launcher was stopped or killed, its workers may still be saving checkpoints.
        self._ending: list[SweepRun] = []
        for status in statuses:
            self.defer_if_running(status)

    def __bool__(self) -> bool:
        return bool(self._pending or self._ending)

    def pop_group(self, sizes: Mapping[str, int]) -> tuple[SweepRun, ...]:
        """Remove and return pending runs, at most `sizes[row]`, or () if no run is ready."""
        first = self.pop()
        if first is None:
            return ()
        runs = [first]
        while len(runs) < sizes.get(first.row, 1) and (other := self.pop(first)) is not None:
            runs.append(other)
        return tuple(runs)

    def pop(self, first: SweepRun | None = None) -> SweepRun | None:
        """Remove and return a run that is ready and can train together with `first`, or None."""
        ended = [run for run in self._ending if not _is_running(run)]
        self._ending = [run for run in self._ending if run not in ended]
        self._pending += ended
        for run in list(self._pending):
            if first is not None and not can_train_together(first, run):
                continue
            # A trainer whose worker was killed saves a checkpoint before it releases the lock.
            is_pending = read_status(run).needs_worker(retry_failed=self._retry_failed)
            if is_pending and (holder := describe_holder(run.path)):
                self._report_wait(run, holder)
                continue
            self._pending.remove(run)
            status = read_status(run)
            if status.needs_worker(retry_failed=self._retry_failed):
                return run
            self.defer_if_running(status)
        return None

    def defer_if_running(self, status: RunStatus) -> bool:
        """Return whether another launcher is training the run. If so, wait for the run to end."""
        # A status names a slot only if the run is on this machine.
        is_elsewhere = status.status == "running" and bool(status.slot)
        if is_elsewhere:
            self._ending.append(status.run)
            self._report_wait(status.run, describe_holder(status.run.path))
        return is_elsewhere

    def _report_wait(self, run: SweepRun, holder: str) -> None:
        if run not in self._reported:
            self._reported.add(run)
            holder = holder or "by another process"
            self._report(f"{run.name}: waiting, because it is already being trained {holder}")


class _Pool:
    """This machine's slots and the workers that occupy them."""

    def __init__(self, sweep: Sweep, slots: Sequence[Slot], step_timeout: float) -> None:
        self._sweep = sweep
        self._step_timeout = step_timeout
        self.workers: dict[tuple[SweepRun, ...], tuple[Slot, subprocess.Popen[bytes]]] = {}
        # If an earlier launcher was killed, its workers keep their slots until they exit.
        statuses = [s for s in map(read_status, sweep.runs) if s.status == "running"]
        running = {x.name: tuple(s.run for s in statuses if s.slot == x.name) for x in slots}
        self._orphans = {running[slot.name]: slot for slot in slots if running[slot.name]}
        self.free = [slot for slot in slots if not running[slot.name]]

    def start(self, runs: tuple[SweepRun, ...]) -> Slot:
        """Start a worker for the runs in a free slot and return the slot."""
        slot = self.free.pop(0)
        self.workers[runs] = slot, start_worker(self._sweep, runs, slot, self._step_timeout)
        return slot

    def remove_ended(self) -> list[tuple[tuple[SweepRun, ...], subprocess.Popen[bytes]]]:
        """Free the slots of workers that have exited; return their runs and processes."""
        ended = []
        for runs, (slot, process) in list(self.workers.items()):
            if process.poll() is not None:
                del self.workers[runs]
                self.free.append(slot)
                ended.append((runs, process))
        orphans = [runs for runs in self._orphans if not any(map(_is_running, runs))]
        self.free += map(self._orphans.pop, orphans)
        return ended

    def stop(self) -> None:
        """Ask all workers to save their progress and exit, and kill workers that take too long."""
        processes = [process for _, process in self.workers.values()]
        for process in processes:
            # `terminate` does nothing if the process has already exited.
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def can_train_together(first: SweepRun, run: SweepRun) -> bool:
    """Return whether one program can train both runs, neither of which has finished training.

    They may differ in their seeds and in numeric settings that a training step takes as arguments.
    A part from outside this package might use such a setting as a constant.
    """
    one, other = first.config, run.config
    train = {"seed": first.seed}
    if not any(section.has_foreign_part for section in (one.model, one.train)):
        numbers = [(x.model.numbers(), x.train.numbers()) for x in (one, other)]
        if [x.keys() for x in numbers[0]] != [x.keys() for x in numbers[1]]:
            return False
        try:
            other = other.change(model=numbers[0][0], train=numbers[0][1])
        except ConfigError:
            # The first run's numbers are valid with the first run's other settings.
            return False
    # `jax.pmap` cannot be part of a larger program.
    is_possible = other.change(train=train) == one and one.train.parallelism != "pmap"
    return is_possible and not any(read_status(x).finished for x in (first, run))


def _is_running(run: SweepRun) -> bool:
    return read_status(run).status == "running"


def _settle_status(
    run: SweepRun, worker: subprocess.Popen[bytes], *, is_stopping: bool
) -> RunStatus:
    """Return the status of a run whose worker has exited, and write it if the worker did not."""
    status, code = read_status(run), worker.returncode
    # If a worker exits early, the status file is missing or describes an earlier attempt.
    is_new = read_json_if_valid(run.status_file).get("pid") == worker.pid
    is_final = status.status in ("done", "failed", "stopped") and status.note != PROCESS_GONE
    # A run that is still running belongs to another worker.
    if is_stopping or code == 0 or status.status == "running" or (is_new and is_final):
        return status
    line = last_log_line(run)
    reason = f"{line}; " if line.startswith("transformer-jax: ") else ""
    note = f"its worker exited with code {code}: {reason}see {run.log_file}"
    write_status(run, "failed", job="", note=note)
    return read_status(run)


def start_worker(
    sweep: Sweep, runs: Sequence[SweepRun], slot: Slot, step_timeout: float
) -> subprocess.Popen[bytes]:
    """Start a worker process for these runs, whose output goes to the first run's log."""
    names = NAME_SEPARATOR.join(run.name for run in runs)
    arguments = [str(sweep.path), names, str(step_timeout)]
    worker = module_command(arguments, "transformer_jax.sweeps.worker")
    # Shortly before the time limit, Slurm sends SIGUSR2 to all processes. Workers ignore the
    # signal, because the launcher handles it. The command uses the shell's `trap`, because
    # `preexec_fn` would run Python code between fork and exec, which is unsafe in a process with
    # other threads.
    command = ["/bin/sh", "-c", 'trap \'\' USR2; exec "$0" "$@"', *worker]
    environment = {**os.environ, **slot.environment, SLOT_VARIABLE: slot.name}
    if slot.cores is not None:
        environment[CORES_VARIABLE] = ",".join(map(str, sorted(slot.cores)))
    log_file = runs[0].log_file
    with storage_errors(f"{log_file} cannot be written"), log_file.open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - runs this package
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A worker in its own session does not receive Ctrl-C; the launcher stops it instead.
            start_new_session=True,
        )
