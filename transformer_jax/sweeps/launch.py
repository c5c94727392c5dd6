"""Run a sweep on this machine, with one worker process for each accelerator or share of the CPU.

A run that fails does not affect other runs. This module does not import JAX, which would reserve
the memory of the devices.
"""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformer_jax.distributed.supervisor import train_command
from transformer_jax.errors import RunInterrupted, StorageError
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.slots import Slot
from transformer_jax.sweeps.status import (
    CORES_VARIABLE,
    PROCESS_GONE,
    SLOT_VARIABLE,
    RunStatus,
    read_status,
    write_status,
)

POLL_SECONDS = 0.2
# The time, in seconds, in which a worker may save after SIGTERM.
STOP_SECONDS = 120.0


def launch(
    sweep: Sweep,
    slots: Sequence[Slot],
    report: Callable[[str], None],
    *,
    retry_failed: bool = False,
    step_timeout: float = 60.0,
) -> list[RunStatus]:
    """Train and score the unfinished runs of a stored sweep; return the status of every run.

    `report` receives a line when a run starts or ends.

    Raises:
        RunInterrupted: a signal ended the sweep. The runs in progress are saved.
        StorageError: the sweep's folder cannot be written.
    """
    queue = deque(run for run in sweep.runs if _is_pending(read_status(run), retry_failed))
    pool = _Pool(sweep, slots, step_timeout)
    with _record_signals() as signals:
        try:
            while (queue and not signals) or pool.workers:
                while queue and pool.free and not signals:
                    run = queue.popleft()
                    # Another launcher may have started the run in the meantime.
                    if _is_pending(read_status(run), retry_failed):
                        report(f"{run.name}: on {pool.start(run).name}")
                time.sleep(POLL_SECONDS)
                if signals:
                    pool.stop()
                for run, code in pool.remove_ended():
                    status = _settle_status(run, code, is_stopping=bool(signals))
                    report(f"{run.name}: {status.summary}")
        finally:
            pool.stop()
    if signals:
        name = signal.Signals(signals[0]).name
        raise RunInterrupted(f"{name}: all runs are saved; the same command resumes the sweep")
    return [read_status(run) for run in sweep.runs]


class _Pool:
    """The slots of this machine, and the workers that occupy them."""

    def __init__(self, sweep: Sweep, slots: Sequence[Slot], step_timeout: float) -> None:
        self._sweep = sweep
        self._step_timeout = step_timeout
        self.workers: dict[SweepRun, tuple[Slot, subprocess.Popen[bytes]]] = {}
        # If another launcher was killed, its workers keep their slots until they end.
        running = {s.slot: s.run for s in map(read_status, sweep.runs) if s.status == "running"}
        self._orphans = {running[slot.name]: slot for slot in slots if slot.name in running}
        self.free = [slot for slot in slots if slot.name not in running]

    def start(self, run: SweepRun) -> Slot:
        """Start a worker for the run in a free slot; return the slot."""
        slot = self.free.pop(0)
        self.workers[run] = slot, start_worker(self._sweep, run, slot, self._step_timeout)
        return slot

    def remove_ended(self) -> list[tuple[SweepRun, int]]:
        """Free the slots of workers that have exited; return the runs and exit codes of our own."""
        ended = []
        for run, (slot, process) in list(self.workers.items()):
            if (code := process.poll()) is not None:
                del self.workers[run]
                self.free.append(slot)
                ended.append((run, code))
        orphans = [run for run in self._orphans if read_status(run).status != "running"]
        self.free += map(self._orphans.pop, orphans)
        return ended

    def stop(self) -> None:
        """Ask all workers to save, and wait until they end; kill workers that take too long."""
        processes = [process for _, process in self.workers.values()]
        for process in processes:
            # This call does not send a signal to a process that has ended.
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _settle_status(run: SweepRun, code: int, *, is_stopping: bool) -> RunStatus:
    """Return the status of a run whose worker has ended; write it if the worker could not do so."""
    status = read_status(run)
    is_final = status.status in ("done", "failed") or is_stopping or code == 0
    if is_final or (status.status == "stopped" and status.note != PROCESS_GONE):
        return status
    note = f"its worker ended with exit code {code}: see {run.log_file}"
    write_status(run, "failed", code=code, note=note)
    return read_status(run)


def _is_pending(status: RunStatus, retry_failed: bool) -> bool:
    return status.status in ("queued", "stopped") or (status.status == "failed" and retry_failed)


def start_worker(
    sweep: Sweep, run: SweepRun, slot: Slot, step_timeout: float
) -> subprocess.Popen[bytes]:
    """Start a worker process that runs the remaining phases of a run."""
    arguments = [str(sweep.path), run.name, str(step_timeout)]
    worker = train_command(arguments, "transformer_jax.sweeps.worker")
    # Slurm announces the time limit by sending SIGUSR2 to all processes, but the launcher decides
    # what to do, so workers ignore it. A shell sets this up, because `preexec_fn` would run Python
    # between fork and exec, which is unsafe with the threads of JAX.
    command = ["/bin/sh", "-c", 'trap \'\' USR2; exec "$0" "$@"', *worker]
    environment = {**os.environ, **slot.environment, SLOT_VARIABLE: slot.name}
    if slot.cores is not None:
        environment[CORES_VARIABLE] = ",".join(map(str, sorted(slot.cores)))
    try:
        with run.log_file.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - runs this package
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In a new session, Ctrl-C reaches only the launcher, which stops its workers.
                start_new_session=True,
            )
    except OSError as error:
        raise StorageError(f"{run.log_file} cannot be written: {error.strerror}") from error


@contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Yield a list that receives the signals that ask this process to end."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    previous = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
