"""Commands that show the status and results of a sweep: `status` and `report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from transformer_jax.commands.base import PathCommand
from transformer_jax.commands.tables import print_statuses, print_table
from transformer_jax.console import shell_command, stdout
from transformer_jax.errors import UsageError


@dataclass(frozen=True)
class Status(PathCommand):
    """Show the status of each run in a sweep."""

    sweep_folder: Positional[Annotated[str, arg(metavar="SWEEP")]]
    """A sweep's folder."""
    argument_name = "a sweep"

    def run(self) -> None:
        """Print the status of each run.

        Raises:
            SweepFailedError: a run failed.
        """
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.status import read_status

        print_statuses([read_status(run) for run in Sweep.open(Path(self.sweep_folder)).runs])


@dataclass(frozen=True)
class Report(PathCommand):
    """Compare results with the paper, test differences for significance, and write a report."""

    folders: Positional[Annotated[tuple[str, ...], arg(metavar="SWEEP|RUN...")]] = ()
    """A sweep's folder, or the folders of runs that were trained separately.
    Runs that differ only in their seed form one row, and the report compares
    each row with the first row."""
    out: Path | None = None
    """The folder for a report on separately trained runs. A report on a sweep
    is always written to the sweep's folder."""
    argument_name = "a sweep, or runs"

    def run(self) -> None:
        """Write the report, and print a summary table and the footnotes.

        Raises:
            UsageError: the options are invalid, the runs cannot be compared, or no run has
                finished.
        """
        from transformer_jax.reports.collect import (
            collect_results,
            collect_runs,
            read_adhoc_statuses,
        )
        from transformer_jax.reports.footnotes import list_footnotes
        from transformer_jax.reports.report import SUMMARY, make_table, write_report
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.status import read_status

        paths = [Path(folder) for folder in self.folders]
        if (paths[0] / "run.json").exists() or len(paths) > 1:
            if self.out is None:
                raise UsageError("a report of runs needs a folder: --out FOLDER")
            sweep = collect_runs(paths, self.out)
            statuses = read_adhoc_statuses(sweep)
            command = shell_command("report", *paths, "--out", self.out)
        else:
            if self.out is not None:
                raise UsageError("--out is for runs; a sweep's report is in the sweep's folder")
            sweep = Sweep.open(paths[0])
            statuses = [read_status(run) for run in sweep.runs]
            command = shell_command("report", sweep.path)
        results = collect_results(sweep, statuses, command)
        folder = write_report(results)
        print_table(make_table(results, SUMMARY))
        stdout.print("\n".join(list_footnotes(results)))
        stdout.print(f"written to {folder}")
