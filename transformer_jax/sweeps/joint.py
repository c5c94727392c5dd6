"""Train several runs in a sweep in one program, in a process that a worker starts.

The worker runs `python -m transformer_jax.sweeps.joint SWEEP ROW/seed-0,ROW/seed-1`. Each run's log
receives the run's progress. When a run ends before the others, its status file says so.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformer_jax.backend import start_backend
from transformer_jax.config.loading import import_inherited
from transformer_jax.console import PlainConsole, run_and_report
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import RunInterrupted, TransformerJaxError, storage_errors
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import NAME_SEPARATOR, Sweep, SweepRun
from transformer_jax.sweeps.status import write_status
from transformer_jax.training.create_run import create_run, open_run
from transformer_jax.training.loop import train_together
from transformer_jax.training.member import Assignment


def train_runs(runs: Sequence[SweepRun], worker: int) -> None:
    """Create or resume the runs, and train them together; `worker` is a process ID."""
    # Resumed runs keep the number of CPU threads that they were created with.
    stored = [RunFolder.open(run.path) for run in runs if (run.path / "run.json").exists()]
    start_backend(stored[0].cpu_threads if stored else None)
    assignments: list[Assignment] = []
    with contextlib.ExitStack() as logs:
        for run in runs:
            with storage_errors(f"{run.log_file} cannot be written"):
                log = logs.enter_context(run.log_file.open("a", encoding="utf-8", buffering=1))
            console = PlainConsole(file=log)
            end = partial(_record_end, run, console, worker)
            try:
                folder = _open_folder(run, console)
            except TransformerJaxError as error:
                end(error)
            else:
                assignments.append(Assignment(folder, console, on_end=end))
        if assignments:
            try:
                train_together(assignments, "repeat the sweep to resume")
            except (TransformerJaxError, RunInterrupted) as error:
                # This process prints the error to the first run's log when it exits.
                for other in assignments:
                    if other.folder.path != runs[0].path:
                        other.console.print(f"transformer-jax: {error}")
                raise


def _open_folder(run: SweepRun, console: PlainConsole) -> RunFolder:
    if not (run.path / "run.json").exists():
        return create_run(run.config, run.path, console)
    return open_run(run.path, run.config)


def _record_end(
    run: SweepRun, console: PlainConsole, worker: int, error: TransformerJaxError | None
) -> None:
    if error is None:
        console.print(f"run stored in {run.path}")
        write_status(run, "running", phase="train", finished=["train"], process=worker)
    else:
        note = f"transformer-jax: {error}"
        console.print(note)
        details = {"exit_code": error.exit_code, "process": worker}
        write_status(run, "failed", phase="train", note=note, **details)


def main(sweep_path: str, run_names: str) -> None:
    """Train the runs with the given names; the parent process is the worker."""
    import_inherited()
    heartbeat.connect()
    sweep = Sweep.open(Path(sweep_path))
    train_runs([sweep.find(name) for name in run_names.split(NAME_SEPARATOR)], os.getppid())


if __name__ == "__main__":
    sys.exit(run_and_report(lambda: main(*sys.argv[1:])))
