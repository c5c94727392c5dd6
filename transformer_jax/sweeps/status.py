"""Read and write the statuses of a sweep's runs.

Statuses are stored in files, so any machine that can access the sweep's folder can read them.
"""

import contextlib
import os
import socket
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from transformer_jax.config.schema import is_own_search
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.errors import Setting, StorageError, SweepFailedError, storage_errors
from transformer_jax.files import (
    JsonObject,
    check_no_links,
    read_json,
    read_json_if_valid,
    write_json,
)
from transformer_jax.remote.copies import uploading
from transformer_jax.runs.metrics_file import is_count, is_number, read_metrics
from transformer_jax.runs.run_folder import evaluation_folders
from transformer_jax.sweeps.plan import SweepRun

Status = Literal["queued", "submitted", "running", "stopped", "failed", "done", "unreadable"]
# A process on another machine is considered lost if it writes nothing for this many seconds.
SILENT_SECONDS = 1800.0
PROCESS_GONE = "its process no longer exists"
# Environment variables that pass a slot's name and CPU cores to its worker.
SLOT_VARIABLE = "TRANSFORMER_JAX_SLOT"
# The slot of a worker whose Slurm job trains only the worker's run.
SLURM_SLOT = "slurm"
CORES_VARIABLE = "TRANSFORMER_JAX_CORES"
# An environment variable with the name of a cluster's job, which can start the same run again.
JOB_VARIABLE = "TRANSFORMER_JAX_JOB"
# To get a run's status, read only this many bytes from the end of its metrics.jsonl.
TAIL_BYTES = 1 << 16
# No operating system assigns a larger process ID.
MAX_PID = 2**31 - 1
# The longest note that is taken from a log.
MAX_NOTE_LENGTH = 300
# Scores from 0 to 100, including the scores of `evaluation.tasks`.
PERCENTAGES = {"bleu", "chrf", "compound_bleu", "precision", "recall", "f1"}


@dataclass(frozen=True)
class RunStatus:
    """A run's status and its results so far."""

    run: SweepRun
    status: Status = "queued"
    phase: str = ""
    """The current or last phase: "train", the split to score, or the job of a submitted run."""
    job: str = ""
    """The ID of the run's latest Slurm job, as `squeue` prints it, or of its cluster's job."""
    slot: str = ""
    """The slot that the local launcher assigned to the run, if the run is on this machine."""
    finished: tuple[Split, ...] = ()
    note: str = ""
    """A one-line explanation of the status, such as the reason for a failure."""
    exit_code: int = 0
    """The exit code of the phase that failed, or 0."""
    fruitless: int = 0
    """The number of consecutive attempts of its cluster's job that made no progress."""
    step: int = 0
    """The last step in metrics.jsonl."""
    perplexity: float | None = None
    """The most recent perplexity per token on the development set."""
    bleu: float | None = None
    """The most recent BLEU score on the development set."""
    seconds_left: float | None = None
    """The estimated number of seconds until training ends, if the run is being trained."""
    evaluations: Mapping[Split, Path] = field(default_factory=dict)
    """The folder of the latest evaluation on each split."""
    scores: Mapping[Split, JsonObject] = field(default_factory=dict)
    """The scores of the latest evaluation on each split."""

    def needs_worker(self, *, retry_failed: bool) -> bool:
        """Return whether a launcher should start a worker for the run."""
        return self.status in ("queued", "stopped") or (retry_failed and self.status == "failed")

    @property
    def summary(self) -> str:
        """A short description of the status."""
        if self.status == "failed":
            # A worker can fail before its first phase.
            phase = f", {self.phase}" if self.phase else ""
            return f"failed{phase}: {self.note}"
        if self.status == "done":
            bleu = "" if self.bleu is None else f", BLEU {self.bleu:.1f}"
            dev = "" if self.perplexity is None else f": dev perplexity {self.perplexity:.3f}"
            return f"done{dev}{bleu}"
        return f"{self.status}: {self.note}" if self.note else self.status

    @property
    def why_missing(self) -> str:
        """An explanation of why the run has no scores."""
        if self.status == "done":
            return "has no scores"
        # A sweep that was extended can have more seeds for some rows than for others.
        is_planned = self.status != "queued" or self.run.config_file.exists()
        return self.summary if is_planned else "not planned"


def current_job() -> str:
    """Return the ID of this process's job, or "". `squeue` prints the IDs of Slurm jobs.

    The worker of a local launcher has no job, even if the launcher runs in a Slurm allocation: the
    allocation can contain several launchers, and its job does not start the run again.
    """
    if os.environ.get(SLOT_VARIABLE, SLURM_SLOT) != SLURM_SLOT:
        return ""
    if job := os.environ.get(JOB_VARIABLE):
        return job
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def write_status(
    run: SweepRun,
    status: Status,
    *,
    phase: str | None = None,
    finished: Sequence[str] | None = None,
    job: str | None = None,
    note: str = "",
    exit_code: int = 0,
    process: int | None = None,
    fruitless: int | None = None,
) -> None:
    """Write a run's status; `RunStatus` describes the fields.

    `phase`, `finished`, and `fruitless` default to the stored values, and `job` to this process's
    job. `process` is the ID of the run's worker process, by default this process.
    """
    process = os.getpid() if process is None else process
    changes = {"phase": phase, "finished": finished, "fruitless": fruitless}
    content = read_json_if_valid(run.status_file) | {
        **{key: value for key, value in changes.items() if value is not None},
        "status": status,
        "job": current_job() if job is None else job,
        "note": note,
        "exit_code": exit_code,
        "slot": os.environ.get(SLOT_VARIABLE, ""),
        "host": socket.gethostname(),
        "pid": process,
        "process_start": _process_start(process),
        "time": time.time(),
    }
    with (
        uploading(run.path.parent, [run.status_file.name]),
        storage_errors(f"{run.status_file} cannot be written"),
    ):
        write_json(run.status_file, content)


def read_status(run: SweepRun) -> RunStatus:
    """Return a run's status and results, or "unreadable" if the run's files are invalid."""
    folder, own = run.path.parent, {run.path, run.config_file, run.log_file, run.status_file}
    names = {path.name for path in own}
    try:
        if folder.is_symlink():
            raise StorageError(f"{folder} is a link")
        check_no_links(folder, names.__contains__)
        stored = read_json(run.status_file) if run.status_file.exists() else {}
        if (run.path / "run.json").exists():
            read_json(run.path / "run.json")
        status = with_results(_parse_status(run, stored), since=_numbers(stored).get("time", 0.0))
        lost = {"dev", "test"} - status.evaluations.keys()
        finished = tuple(phase for phase in status.finished if phase not in lost)
        if finished != status.finished and status.status == "done":
            # A user has deleted scores, so that the sweep scores the run again.
            status = replace(status, status="queued", note="its scores were deleted")
        return replace(status, finished=finished)
    except (OSError, StorageError) as error:
        return mark_unreadable(RunStatus(run), error)


def mark_unreadable(status: RunStatus, error: Exception) -> RunStatus:
    """Return the status of a run whose files cause this error."""
    return replace(status, status="unreadable", note=str(error), evaluations={}, scores={})


def _parse_status(run: SweepRun, stored: JsonObject) -> RunStatus:
    """Return the status in a status file; raise a StorageError if a value is invalid."""
    status, finished = stored.get("status", "queued"), stored.get("finished", [])
    if status not in get_args(Status):
        raise StorageError(f"{run.status_file} is invalid: its status is {status!r}")
    if not isinstance(finished, list) or not all(phase in SPLITS for phase in finished):
        raise StorageError(f"{run.status_file} is invalid: its finished phases are {finished!r}")
    if finished and not run.path.exists():
        # A user has deleted the run, so that the sweep trains it again.
        status, finished = "queued" if status == "done" else status, finished[:0]
    note = str(stored.get("note", ""))
    if status == "running" and (reason := _reason_if_lost(run, stored)):
        status, note = "stopped", reason
    is_local = stored.get("host") == socket.gethostname()
    return RunStatus(
        run,
        status,
        phase=str(stored.get("phase", "")),
        job=str(stored.get("job", "")),
        slot=str(stored.get("slot", "")) if is_local else "",
        finished=tuple(finished),
        note=note,
        exit_code=code if is_count(code := stored.get("exit_code")) else 0,
        fruitless=number if is_count(number := stored.get("fruitless")) else 0,
    )


def with_results(status: RunStatus, *, any_search: bool = False, since: float = 0.0) -> RunStatus:
    """Return the status with results from the run's metrics and latest evaluations.

    The remaining time is estimated from reports written at or after the Unix time `since`. Values
    of unexpected types are ignored, because another program may have written the files.

    Raises:
        StorageError: a score is out of its range.
    """
    run = status.run
    metrics = read_metrics(run.path / "metrics.jsonl", TAIL_BYTES)
    train, dev = (
        [_numbers(x) for x in metrics if x.get("split") == name] for name in ("train", "dev")
    )
    newest_folders = {s: newest_evaluation(run, s, any_search=any_search) for s in SPLITS}
    evaluations = {split: folder for split, folder in newest_folders.items() if folder is not None}
    scores = {s: _read_scores(folder) for s, folder in evaluations.items()}
    dev_bleus = [{"bleu": report["bleu"]} for report in dev if "bleu" in report]
    # Reports written before an interruption would make training appear slow.
    timed = [report for report in train if "time" in report and report["time"] >= since]
    newest = ChainMap(_numbers(scores.get("dev", {})), *dev[-1:], *dev_bleus[-1:])
    is_running = status.status == "running"
    return replace(
        status,
        step=max((line["step"] for line in metrics), default=0),
        perplexity=newest.get("perplexity"),
        bleu=newest.get("bleu"),
        seconds_left=_seconds_left(timed, run.config.train.steps) if is_running else None,
        evaluations=evaluations,
        scores=scores,
    )


def _read_scores(folder: Path) -> JsonObject:
    """Return an evaluation's scores; raise a StorageError if one is out of its range."""
    scores = read_json(folder / "scores.json")
    task = scores.get("task")
    numbers = _numbers(scores) | _numbers(task if isinstance(task, dict) else {})
    if numbers.get("perplexity", 1.0) <= 0:
        raise StorageError(f"{folder} is invalid: its perplexity is {numbers['perplexity']}")
    for name in PERCENTAGES & numbers.keys():
        # The negated comparison also rejects NaN. Rounding can make a perfect score exceed 100.
        if not 0 <= numbers[name] <= 100.001:
            raise StorageError(f"{folder} is invalid: its {name} is {numbers[name]}")
    return scores


def newest_evaluation(run: SweepRun, split: Split, *, any_search: bool = False) -> Path | None:
    """Return the folder of the evaluation of a split at the latest step.

    At the same step, an evaluation that used the search options in the run's config takes
    precedence, and then the one that averaged the most checkpoints. Unless `any_search` is true,
    consider only evaluations that used the options in the config, and evaluations of one checkpoint
    only if the config requests no average or if there is no evaluation of an average.

    Raises:
        StorageError: the scores of an evaluation are damaged.
    """
    decode = run.config.decode
    candidates = []
    for folder in evaluation_folders(run.path, f"{split}-step"):
        file = folder / "scores.json"
        # A new evaluation may have deleted the file.
        with contextlib.suppress(FileNotFoundError):
            scores = read_json(file)
            step, averaged = scores.get("step", 0), scores.get("average_checkpoints", 1)
            is_own = is_own_search(scores, decode)
            if is_count(step) and is_count(averaged) and (any_search or is_own):
                is_preferred = any_search or averaged > 1 or decode.average_checkpoints == 1
                # Do not compare modification times, because copying a run changes them.
                candidates.append((is_preferred, step, is_own, averaged, folder.name, folder))
    return max(candidates)[-1] if candidates else None


def _reason_if_lost(run: SweepRun, stored: JsonObject) -> str:
    """Explain why a run's process is considered lost, or return "" if it is not."""
    if stored.get("host") == socket.gethostname():
        pid = stored.get("pid")
        # Signals to the process ID 0 and to negative IDs go to groups of processes.
        if not is_count(pid) or not 0 < pid <= MAX_PID:
            return PROCESS_GONE
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return PROCESS_GONE
        except PermissionError:
            pass
        # After a reboot, another process may have the same ID.
        start = stored.get("process_start")
        is_same = not start or start == _process_start(pid)
        return "" if is_same else PROCESS_GONE
    # Downloads change the modification times of all files except the log, which is never uploaded.
    reports = read_metrics(run.path / "metrics.jsonl", TAIL_BYTES)[-1:]
    times = [_numbers(x).get("time", 0.0) for x in (stored, *reports)]
    if run.log_file.exists():
        times.append(run.log_file.stat().st_mtime)
    age = time.time() - max(times)
    return "" if age < SILENT_SECONDS else f"the run has written nothing for {age / 60:.0f} minutes"


def _process_start(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, or "" if /proc is not available."""
    try:
        # Skip the second field, the program's name in parentheses, because it may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _seconds_left(timed: list[JsonObject], steps: int) -> float | None:
    """Estimate the remaining training time in seconds from the last ten training reports."""
    timed = timed[-10:]
    if not timed or timed[0]["step"] == timed[-1]["step"]:
        return None
    first, last = timed[0], timed[-1]
    seconds_per_step = (last["time"] - first["time"]) / (last["step"] - first["step"])
    return max(0.0, seconds_per_step * (steps - last["step"]))


def _numbers(report: JsonObject) -> JsonObject:
    """Return the numeric values in a report."""
    return {key: value for key, value in report.items() if is_number(value)}


def check_finished(statuses: Sequence[RunStatus]) -> None:
    """Raise a SweepFailedError if a run failed or cannot be read."""
    unreadable = [status.run.name for status in statuses if status.status == "unreadable"]
    failed = [status.run.name for status in statuses if status.status == "failed"]
    if unreadable:
        raise SweepFailedError(
            f"{len(unreadable)} of {len(statuses)} runs cannot be read: {', '.join(unreadable)}; "
            "repair or remove the files that the status names"
        )
    if failed:
        raise SweepFailedError(
            f"{len(failed)} of {len(statuses)} runs failed: {', '.join(failed)}; to train them "
            "again, repeat the sweep with ",
            Setting("retry_failed", True),
        )


def last_log_line(run: SweepRun) -> str:
    """Return the end of the last nonblank line in the run's log."""
    if not run.log_file.exists():
        return "see the log of its job"
    lines = run.log_file.read_text("utf-8", "replace").split("\n")
    return next(filter(str.strip, reversed(lines)), "")[-MAX_NOTE_LENGTH:]


def measure_progress(run: SweepRun) -> tuple[int, int]:
    """Return the number of finished phases and the step of the latest checkpoint."""
    steps = [int(path.name) for path in run.path.glob("checkpoints/*") if path.name.isdecimal()]
    return len(read_status(run).finished), max(steps, default=0)
