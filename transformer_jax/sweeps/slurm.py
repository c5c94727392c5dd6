"""Submit a sweep to Slurm as one array job, with one task per unfinished run.

The submitit library writes its scripts, logs, and pickle files to the sweep's `slurm/` folder. The
pickle files contain only strings and numbers, and only submitit reads them. Each run's status and
log are in the same files that the local launcher uses.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.config.loading import import_inherited
from transformer_jax.errors import ConnectionFailedError, RunInterrupted, StorageError, UsageError
from transformer_jax.optional import import_optional
from transformer_jax.sweeps.launch import start_worker
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.resources import Resources
from transformer_jax.sweeps.slots import Slot
from transformer_jax.sweeps.status import (
    SLURM_SLOT,
    RunStatus,
    current_job,
    measure_progress,
    read_status,
    write_status,
)

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

# Slurm sends a signal this many seconds before the time limit, or after three quarters of the limit
# if that is later, so that a trainer has time to save.
SAVING_SECONDS = 120
# The number of seconds that a task waits for the submitting process to record the task's job ID.
SUBMISSION_SECONDS = 60.0
# The number of seconds that a task waits for Slurm to kill or requeue it after its worker exits.
LINGER_SECONDS = 300.0
# A run fails after this many consecutive allocations without progress.
MAX_FRUITLESS_REQUEUES = 3
# The submitit library limits how many times a task can time out, even if its run makes progress.
# This value effectively disables that limit.
MAX_TIMEOUTS = 10_000


@dataclass
class Task:
    """One task of the array job. Each task starts the worker of one run.

    The submitit library pickles the task and calls it on the compute node. The task's private
    attributes change only on that node.
    """

    sweep: str
    """The sweep's folder."""
    run_name: str
    step_timeout: float
    fruitless_requeues: int = 0
    """The number of consecutive allocations without progress before the current allocation."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _progress_at_start: tuple[int, int] = field(default=(0, 0), init=False)
    _is_ending: bool = field(default=False, init=False)

    def __call__(self) -> None:
        """Run the remaining phases in a worker, and exit with the worker's exit code."""
        import_inherited()
        sweep = Sweep.open(Path(self.sweep))
        run = sweep.find(self.run_name)
        _await_submission(run)
        self._progress_at_start = measure_progress(run)
        signal.signal(signal.SIGTERM, lambda *_: self._end_worker())
        self._process = start_worker(sweep, [run], Slot(SLURM_SLOT), self.step_timeout)
        if self._is_ending:
            self._end_worker()
        _await_exit(self._process)
        code = self._process.wait()
        status = read_status(run)
        # A killed worker does not write a final status, but a worker that had time to save may have
        # written one.
        if status.status in ("submitted", "stopped"):
            note = status.note or f"its worker exited with code {code}"
            if self._is_ending:
                note = f"Slurm ended job {current_job()} and may requeue it"
            write_status(run, "stopped", note=note)
            if self._is_ending:
                # If the task exited now, Slurm would consider it complete. Therefore, wait until
                # Slurm either kills the task (and perhaps requeues it) or sends the signal that
                # makes submitit requeue the task.
                time.sleep(LINGER_SECONDS)
        if code:
            sys.exit(code if code > 0 else RunInterrupted.exit_code)

    def checkpoint(self) -> "DelayedSubmission | None":
        """Let the worker save its progress, and return a task for submitit to requeue.

        Return None if the run has finished, has failed, or no longer makes progress. The submitit
        library calls this method when Slurm signals that the time limit is near or that the job is
        being preempted.
        """
        from submitit.helpers import DelayedSubmission

        run = Sweep.open(Path(self.sweep)).find(self.run_name)
        self._end_worker()
        if self._process is not None:
            _await_exit(self._process)
        if read_status(run).status in ("done", "failed"):
            return None
        has_progressed = measure_progress(run) > self._progress_at_start
        fruitless_requeues = 0 if has_progressed else self.fruitless_requeues + 1
        if fruitless_requeues == MAX_FRUITLESS_REQUEUES:
            note = f"no progress in {MAX_FRUITLESS_REQUEUES} allocations: increase slurm.time"
            write_status(run, "failed", note=note)
            return None
        write_status(run, "submitted", phase=f"job {current_job()}")
        return DelayedSubmission(replace(self, fruitless_requeues=fruitless_requeues))

    def _end_worker(self) -> None:
        self._is_ending = True
        if self._process is not None:
            self._process.terminate()


def _await_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process exits, but do not reap it: `Popen.wait` still needs its exit code."""
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _await_submission(run: SweepRun) -> None:
    # Slurm may start a task before the submitting process has written the run's status. Wait for
    # the submitting process, which would otherwise overwrite the worker's status.
    deadline = time.monotonic() + SUBMISSION_SECONDS
    while (job := read_status(run).job) != current_job():
        if time.monotonic() > deadline:
            raise UsageError(f"{run.name} belongs to {f'job {job}' if job else 'no job'}")
        time.sleep(0.2)


def check_available() -> None:
    """Raise an error if submitit is not installed or Slurm does not respond."""
    import_optional("submitit", "the Slurm launcher")
    for name in ("sbatch", "srun"):
        _find_program(name)
    list_jobs()


def reconcile(sweep: Sweep) -> list[RunStatus]:
    """Mark runs as stopped if their Slurm jobs no longer exist; return the statuses of all runs."""
    active = _active_jobs(sweep)
    jobs = list_jobs() if active else set()
    # Read the statuses again, because jobs that finished after the first read are also missing from
    # the list.
    for run, job in _active_jobs(sweep).items():
        if active.get(run) == job and job not in jobs:
            write_status(run, "stopped", note=f"job {job} no longer exists", job=job)
    return [read_status(run) for run in sweep.runs]


def _active_jobs(sweep: Sweep) -> dict[SweepRun, str]:
    statuses = map(read_status, sweep.runs)
    return {s.run: s.job for s in statuses if s.job and s.status in ("submitted", "running")}


def list_jobs() -> set[str]:
    """Return the IDs of all pending and running jobs, formatted like `RunStatus.job`."""
    # List all jobs, because squeue fails if a job passed to `--jobs` has ended.
    command = [_find_program("squeue"), "--noheader", "--array", "--format=%i"]
    squeue = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    output, errors = (x.decode(errors="replace") for x in (squeue.stdout, squeue.stderr))
    if squeue.returncode:
        raise ConnectionFailedError(f"Slurm does not respond: {_join_lines(errors)}")
    return set(output.split())


def submit(
    sweep: Sweep, resources: Resources, *, retry_failed: bool = False, step_timeout: float = 60.0
) -> list[str]:
    """Submit the unfinished runs in a stored sweep, except those that are pending or running.

    Failed runs are submitted only with `retry_failed`. Return the job IDs as `squeue` prints them.
    """
    statuses, jobs = reconcile(sweep), list_jobs()
    wanted = (s for s in statuses if s.needs_worker(retry_failed=retry_failed))
    # Slurm may have requeued a stopped run's job.
    runs = [s.run for s in wanted if s.job not in jobs]
    if not runs:
        return []
    tasks = [Task(str(sweep.path.resolve()), run.name, step_timeout) for run in runs]
    new_jobs = _submit_array(sweep.path.resolve(), tasks, resources)
    for run, job in zip(runs, new_jobs, strict=True):
        write_status(run, "submitted", phase=f"job {job}", job=job)
    return new_jobs


def _submit_array(path: Path, tasks: list[Task], resources: Resources) -> list[str]:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(path / "slurm", max_num_timeout=MAX_TIMEOUTS)
    optional = {
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "gres": resources.gres,
        "setup": None if resources.setup is None else [resources.setup],
        "gpus_per_node": resources.gpus or None,
        "cpus_per_task": resources.cpus,
        "mem": None if resources.memory_gb is None else f"{round(1024 * resources.memory_gb)}MB",
    }
    executor.update_parameters(
        **{name: value for name, value in optional.items() if value is not None},
        job_name=path.name,
        time=resources.minutes,
        array_parallelism=resources.max_parallel,
        signal_delay_s=min(SAVING_SECONDS, 15 * resources.minutes),
        stderr_to_stdout=True,
        # srun does not inherit this option from sbatch.
        srun_args=[f"--cpus-per-task={resources.cpus}"] if resources.cpus else [],
        additional_parameters={"requeue": True},
    )
    try:
        # When submitit raises an exception, it also prints the message to standard error.
        with contextlib.redirect_stderr(io.StringIO()):
            return [job.job_id for job in executor.submit_array(tasks)]
    except (FailedJobError, FailedSubmissionError) as error:
        raise UsageError(f"Slurm rejects the job: {_join_lines(str(error))}") from error
    except OSError as error:
        raise StorageError(f"{path / 'slurm'} cannot be written: {error.strerror}") from error


def _find_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConnectionFailedError(f"{name} is not on PATH: use a machine with Slurm")
    return path


def _join_lines(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
