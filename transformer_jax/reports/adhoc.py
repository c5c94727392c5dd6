"""Treat separately trained runs as a sweep so that a report can compare them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformer_jax.config import Row
from transformer_jax.console import shell_command
from transformer_jax.errors import Setting, StorageError, UsageError
from transformer_jax.runs.grouping import group_runs
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.status import RunStatus, with_results


def collect_runs(paths: Sequence[Path], out: Path) -> Sweep:
    """Group existing runs into a sweep. Runs that differ only in their seed share a row.

    Raises:
        UsageError: a path is not a run or is listed twice, two runs have the same config and seed,
            or the runs were trained on different text or with different vocabularies.
        StorageError: `out`, the folder for the report, exists but does not contain a report.
    """
    if out.exists() and not (out / "report" / "table.csv").exists():
        raise StorageError(
            f"{out} exists but does not contain a report: choose another folder (",
            Setting("out", "FOLDER"),
            ")",
        )
    groups = group_runs([RunFolder.open(path) for path in paths])
    runs: list[SweepRun] = []
    for row, folders in groups.items():
        for folder in folders:
            seed = folder.config.train.seed
            if any((run.row, run.seed) == (row, seed) for run in runs):
                raise UsageError(f"{folder.path} has the same config and seed as another run")
            runs.append(SweepRun(folder.path, str(folder.path), row, seed, folder.config))
    rows = {
        row: Row(folders[0].config.change(train={"seed": 0})) for row, folders in groups.items()
    }
    return Sweep(out, rows, runs)


def read_adhoc_status(run: SweepRun) -> RunStatus:
    """Return a separately trained run's status, which is "done" if the run has been evaluated."""
    status = with_results(RunStatus(run), any_search=True)
    if not status.scores:
        command = shell_command("evaluate", run.path, "--split", "dev")
        return replace(status, status="stopped", note=f"not scored: {command}")
    steps = run.config.train.steps
    note = f"has finished {status.step:,} of {steps:,} steps" if status.step < steps else ""
    return replace(status, status="done", note=note)


def read_adhoc_statuses(sweep: Sweep) -> list[RunStatus]:
    """Return the statuses of separately trained runs; raise UsageError if no run has scores."""
    statuses = [read_adhoc_status(run) for run in sweep.runs]
    if all(status.status != "done" for status in statuses):
        raise UsageError(f"{statuses[0].run.path} is {statuses[0].note}")
    return statuses
