"""How each run of a sweep stands, from its files alone: so also from another machine."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformer_jax.console import shell_command
from transformer_jax.data.splits import SPLITS, Split
from transformer_jax.errors import StorageError
from transformer_jax.runs.atomic_files import write_json
from transformer_jax.sweeps.plan import PlannedRun

Name = Literal["queued", "submitted", "running", "stopped", "failed", "done"]
# Of another machine's process all that can be seen is that it writes, or does not.
SILENT_SECONDS = 1800.0
# In a worker's environment: where it was put, and on which cores of a CPU.
SLOT = "TRANSFORMER_JAX_SLOT"
CORES = "TRANSFORMER_JAX_CORES"
# Of a file of reports, its end tells how a run stands.
TAIL_BYTES = 1 << 16
MAX_REPORTS = 64 << 20


@dataclass(frozen=True)
class RunStatus:
    """How a run stands."""

    run: PlannedRun
    status: Name = "queued"
    phase: str = ""
    """Of a run that is running, or that stopped or failed then: train, or the set it scores. Of one
    that is submitted: its job."""
    job: str = ""
    """Of a run that Slurm has, or had: as `squeue` names it."""
    slot: str = ""
    """Of a run on this machine: the place of the launcher's that it was given."""
    finished: tuple[str, ...] = ()
    code: int | None = None
    """Exit code of what failed or was stopped."""
    note: str = ""
    """Why it failed, in one line."""
    step: int = 0
    perplexity: float | None = None
    """On the development set, the newest that is known."""
    bleu: float | None = None
    """The same."""
    seconds_left: float | None = None
    """Of training, if it goes on as in the last reports."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """What `evaluate` found, by set."""

    @property
    def summary(self) -> str:
        """The same in a few words."""
        if self.status == "failed":
            return f"failed, {self.phase}: {self.note}"
        if self.status == "done":
            bleu = "" if self.bleu is None else f", BLEU {self.bleu:.1f}"
            perplexity = (
                "" if self.perplexity is None else f": dev perplexity {self.perplexity:.3f}"
            )
            return f"done{perplexity}{bleu}"
        return f"{self.status}: {self.note}" if self.note else self.status


def slurm_job() -> str:
    """Return the job of Slurm's that this process is part of, as `squeue` names it, or ""."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def write_status(run: PlannedRun, name: Name, **details: Any) -> None:
    """Keep how a run stands; what is not said stays as it was."""
    known = _read_json(run.state)
    here = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "began": _began(os.getpid()),
        "slot": os.environ.get(SLOT, ""),
        "job": slurm_job(),
        "time": time.time(),
    }
    try:
        write_json(run.state, {**known, "code": None, "note": "", **here, "name": name, **details})
    except OSError as error:
        raise StorageError(f"{run.state} cannot be written: {error.strerror}") from error


def read_status(run: PlannedRun) -> RunStatus:
    """Return how a run stands."""
    known = _read_json(run.state)
    name: Name = known.get("name", "queued")
    note = str(known.get("note", ""))
    if name == "running" and (fault := _fault_of_worker(run, known)):
        name, note = "stopped", fault
    reports = read_reports(run.path / "metrics.jsonl", TAIL_BYTES)
    train = [line for line in reports if line.get("split") == "train"]
    dev = [line for line in reports if line.get("split") == "dev"]
    bleus = [line["bleu"] for line in dev if "bleu" in line]
    scores: dict[str, dict[str, Any]] = {
        split: _read_json(folder / "scores.json")
        for split in SPLITS
        if (folder := newest_evaluation(run, split)) is not None
    }
    step = max((int(line["step"]) for line in reports), default=0)
    if not run.is_planned:
        # What counts is whether it was scored.
        name = "done" if scores else "stopped"
        note = (
            "" if scores else f"not scored: {shell_command('evaluate', run.path, '--split', 'dev')}"
        )
        if scores and step < run.config.train.steps:
            note = f"has done {step:,} of {run.config.train.steps:,} steps"
    best = scores.get("dev", {})
    return RunStatus(
        run,
        name,
        phase=str(known.get("doing", "")),
        job=str(known.get("job", "")),
        slot=str(known.get("slot", "")) if known.get("host") == socket.gethostname() else "",
        finished=tuple(known.get("finished", ())),
        code=known.get("code"),
        note=note,
        step=step,
        perplexity=best.get("perplexity", dev[-1]["perplexity"] if dev else None),
        bleu=best.get("bleu", bleus[-1] if bleus else None),
        seconds_left=_seconds_left(train, run.config.train.steps) if name == "running" else None,
        scores=scores,
    )


def newest_evaluation(run: PlannedRun, split: Split) -> Path | None:
    """Return where the scores of a set are: of the latest step, and of these the last made.

    Of a sweep's run only those by its own search and average count: others are someone's trial.
    """
    found = []
    for path in run.path.glob(f"evaluations/{split}-step*/scores.json"):
        scores = _read_json(path)
        decode = run.config.decode
        is_own = (scores.get("decode"), scores.get("average_checkpoints")) == (
            asdict(decode),
            decode.average_checkpoints,
        )
        if is_own or not run.is_planned:
            found.append((scores.get("step", 0), path.stat().st_mtime, path.parent))
    return max(found)[-1] if found else None


def _fault_of_worker(run: PlannedRun, known: Mapping[str, Any]) -> str:
    """Return why what is said to be running is not, or ""."""
    if known.get("host") == socket.gethostname():
        try:
            os.kill(int(known["pid"]), 0)
        except (ProcessLookupError, KeyError, ValueError):
            return "its process is gone"
        except PermissionError:
            pass
        # After a restart the number may be another's.
        is_same = _began(int(known["pid"])) == known.get("began", "")
        return "" if is_same or not known.get("began") else "its process is gone"
    last = max(
        (
            path.stat().st_mtime
            for path in (run.state, run.log, run.path / "metrics.jsonl")
            if path.exists()
        ),
        default=0.0,
    )
    age = time.time() - last
    return "" if age < SILENT_SECONDS else f"nothing was written for {age / 60:.0f} minutes"


def _began(pid: int) -> str:
    """Return when a process began, in the system's own count; "" where it does not tell."""
    try:
        # The name, in brackets, may have spaces.
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _seconds_left(train: list[dict[str, Any]], steps: int) -> float | None:
    recent = train[-10:]
    if len(recent) < 2 or recent[-1]["step"] == recent[0]["step"]:
        return None
    first, last = recent[0], recent[-1]
    pace = (last["time"] - first["time"]) / (last["step"] - first["step"])
    return max(0.0, pace * (steps - last["step"]))


def read_reports(path: Path, most: int = MAX_REPORTS) -> list[dict[str, Any]]:
    """Return the reports in the last so many bytes; what is no whole line is left out."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        lines = []
        for line in file.read(most).splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "step" in found:
                    lines.append(found)
        return lines
    return []


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object, or none where there is no file, or it is being written."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return found
    return {}
