"""Submit a sweep to Slurm: one array job, with a task for each run that is unfinished.

submitit writes its scripts, logs and pickles into `slurm/` of the sweep. A pickle is between
submitit here and submitit on the node, and holds strings and numbers alone; nothing of ours reads
one. A run's own state and log lie where they always do.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformer_jax.errors import ConnectionFailedError, StorageError, UsageError
from transformer_jax.sweeps.launch import Slot, begin
from transformer_jax.sweeps.plan import PlannedRun, Sweep
from transformer_jax.sweeps.resources import Resources
from transformer_jax.sweeps.status import RunStatus, read_status, slurm_job, write_status

# Exit code of what was saved, and can go on.
SAVED = 75
# Before the limit of time: for a trainer to save. Of a short limit it is a quarter.
SAVING_SECONDS = 120
# How long a task waits until the state of its run names it.
NOTE_SECONDS = 60.0
# How long one that was told to end, and has saved, waits for what Slurm does next.
LINGER_SECONDS = 300.0
# After so many allocations in a row that brought a run no further, it has failed.
MAX_FRUITLESS_REQUEUES = 3
# submitit's own count, of limits that were reached, knows nothing of progress.
REQUEUES = 10_000


class Task:
    """What a task of the array does: one run, in the worker process that every launcher starts.

    submitit keeps it as a pickle, and calls it on the node.
    """

    # On the node alone.
    _process: subprocess.Popen[bytes] | None = None
    _reached: tuple[int, int] = (0, 0)
    _is_told = False

    def __init__(self, sweep: str, name: str, step_timeout: float, vain: int = 0) -> None:
        """Describe it, by what is plain.

        Args:
            sweep: the sweep's folder.
            name: the run's.
            hang_seconds: as the worker takes it.
            vain: how many allocations before this one, in a row, brought the run no further.
        """
        self.sweep = sweep
        self.name = name
        self.step_timeout = step_timeout
        self.fruitless = vain

    def __call__(self) -> None:
        """Do what is left of the run; end with the worker's exit code."""
        run = self._open()
        _await_note(run)
        self._reached = _progress(run)
        signal.signal(signal.SIGTERM, lambda *_: self._pass_on())
        self._process = begin(run, Slot("slurm"), self.step_timeout)
        if self._is_told:
            self._pass_on()
        _wait(self._process)
        code = self._process.wait()
        state = read_status(run)
        if state.status in ("submitted", "stopped"):
            # It may have been killed before it could say so itself.
            told = state.note or f"its process ended with {code}"
            if self._is_told:
                told = f"Slurm ended {_job(slurm_job())}, and may queue it again, or not"
            write_status(run, "stopped", code=code, note=told)
            if self._is_told:
                # To end here would look as if nothing were left to do. Slurm kills this task, and
                # queues it again or not, or gives the signal at which submitit does so.
                time.sleep(LINGER_SECONDS)
        if code:
            sys.exit(code if code > 0 else SAVED)

    def checkpoint(self) -> Any:
        """Let the worker save, and return what shall go on in another allocation; None if nothing.

        submitit calls it, and queues the task again, at the signal that Slurm gives before the
        limit of time, or where it takes the node for another job.
        """
        from submitit.helpers import DelayedSubmission

        run = self._open()
        self._pass_on()
        if self._process is not None:
            _wait(self._process)
        state = read_status(run)
        if state.status in ("done", "failed"):
            return None
        vain = 0 if _progress(run) > self._reached else self.fruitless + 1
        if vain == MAX_FRUITLESS_REQUEUES:
            told = f"ended {MAX_FRUITLESS_REQUEUES} times before it got any further: it needs more --slurm.time"
            write_status(run, "failed", code=SAVED, note=told)
            return None
        write_status(run, "submitted", doing=_job(slurm_job()))
        return DelayedSubmission(Task(self.sweep, self.name, self.step_timeout, vain))

    def _open(self) -> PlannedRun:
        return Sweep.open(Path(self.sweep)).run(self.name)

    def _pass_on(self) -> None:
        self._is_told = True
        # Not by Popen, which would wait for a lock that whatever was interrupted here may hold.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process is over, and leave its exit code to be read: any number of times."""
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _await_note(run: PlannedRun) -> None:
    """Wait until this is the job that a run's state names, or end: another has the run.

    Slurm may start a task before whoever submitted it has noted so. Were it not for this, the
    note could come after what the worker says.
    """
    until = time.monotonic() + NOTE_SECONDS
    while (noted := read_status(run).job) != slurm_job():
        if time.monotonic() > until:
            raise UsageError(f"{run.name} was left to {_job(noted) if noted else 'no job'}")
        time.sleep(0.2)


def _progress(run: PlannedRun) -> tuple[int, int]:
    """Return how many of a run's jobs are finished, and the step of its newest checkpoint."""
    saved = [int(path.name) for path in run.path.glob("checkpoints/*") if path.name.isdecimal()]
    return len(read_status(run).finished), max(saved, default=0)


def check_here() -> None:
    """Make sure that this machine can submit.

    Raises:
        UsageError: submitit is not installed.
        UnreachableError: there is no Slurm here, or it does not answer.
    """
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise UsageError("--launcher slurm needs submitit: pip install '.[slurm]'") from None
    for name in ("sbatch", "srun"):
        _tool(name)
    queued_jobs()


def reconcile(sweep: Sweep) -> list[RunStatus]:
    """Note what Slurm has no more, though its state does not say so; return the state of all runs.

    Raises:
        UnreachableError: Slurm cannot be asked.
        StorageError: a state cannot be written.
    """
    states = [read_status(run) for run in sweep.runs]
    if any(state.job and state.status in ("submitted", "running") for state in states):
        there = queued_jobs()
        for state in states:
            if state.job and state.job not in there and state.status in ("submitted", "running"):
                told = f"{_job(state.job)} is gone"
                write_status(state.run, "stopped", code=SAVED, note=told, job=state.job)
    return [read_status(run) for run in sweep.runs]


def queued_jobs() -> set[str]:
    """Return all jobs that wait or run, as State.job names them.

    Raises:
        UnreachableError: Slurm does not answer.
    """
    # All of them: of single ones squeue takes those that are over for a mistake.
    command = [_tool("squeue"), "--noheader", "--array", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ConnectionFailedError(f"Slurm does not answer: {_joined(done.stderr)}")
    return set(done.stdout.split())


def submit(
    sweep: Sweep, resources: Resources, *, retry_failed: bool = False, step_timeout: float = 60.0
) -> list[str]:
    """Submit what is unfinished of a sweep; return the jobs, as `squeue` names them.

    What waits or runs is not submitted again, whoever runs it. What failed is, if it shall be
    retried.

    Raises:
        UsageError: Slurm refuses.
        UnreachableError: Slurm does not answer.
        StorageError: the sweep's folder cannot be written.
    """
    states, there = reconcile(sweep), queued_jobs()
    wanted = {"queued", "stopped", *(["failed"] if retry_failed else [])}
    # One that saved when it was told to end may be queued again by Slurm.
    runs = [s.run for s in states if s.status in wanted and s.job not in there]
    if not runs:
        return []
    jobs = _submit_array(sweep, runs, resources, step_timeout)
    for run, job in zip(runs, jobs, strict=True):
        write_status(run, "submitted", doing=_job(job), job=job)
    return jobs


def _submit_array(
    sweep: Sweep, runs: list[PlannedRun], resources: Resources, step_timeout: float
) -> list[str]:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    path = sweep.path.resolve()
    executor = submitit.SlurmExecutor(path / "slurm", max_num_timeout=REQUEUES)
    asked = {
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "gpus_per_node": resources.gpus or None,
        "cpus_per_task": resources.cpus,
        "mem": None if resources.memory_gb is None else f"{round(1024 * resources.memory_gb)}MB",
    }
    executor.update_parameters(
        **{name: value for name, value in asked.items() if value is not None},
        job_name=path.name,
        time=resources.minutes,
        array_parallelism=resources.max_parallel,
        signal_delay_s=min(SAVING_SECONDS, 15 * resources.minutes),
        stderr_to_stdout=True,
        # From sbatch srun does not take it over.
        srun_args=[f"--cpus-per-task={resources.cpus}"] if resources.cpus else [],
        additional_parameters={"requeue": True},
    )
    tasks = [Task(str(path), run.name, step_timeout) for run in runs]
    try:
        # submitit repeats there what its error says.
        with contextlib.redirect_stderr(io.StringIO()):
            return [job.job_id for job in executor.submit_array(tasks)]
    except (FailedJobError, FailedSubmissionError) as error:
        raise UsageError(f"Slurm refuses: {_joined(str(error))}") from error
    except OSError as error:
        raise StorageError(f"{path / 'slurm'} cannot be written: {error.strerror}") from error


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConnectionFailedError(
            f"no {name} on the path: only a machine of Slurm's can ask Slurm"
        )
    return path


def _job(name: str) -> str:
    return f"job {name}"


def _joined(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
