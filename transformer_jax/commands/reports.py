"""Commands that show the status and results of a sweep: `status` and `report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from transformer_jax.commands.base import PathCommand
from transformer_jax.commands.tables import print_statuses, print_table
from transformer_jax.console import stdout


@dataclass(frozen=True)
class Status(PathCommand):
    """Show the status of each run in a sweep, and of each trial of a tuned sweep."""

    sweep_folder: Positional[Annotated[str, arg(metavar="SWEEP")]]
    """A sweep's folder."""
    argument_name = "a sweep"

    def run(self) -> None:
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.status import read_status

        print_statuses([read_status(run) for run in Sweep.open(Path(self.sweep_folder)).all_runs])


@dataclass(frozen=True)
class Report(PathCommand):
    """Compare results with the paper, test differences for significance, and write a report."""

    folders: Positional[Annotated[tuple[str, ...], arg(metavar="SWEEP|RUN...")]] = ()
    """A sweep's folder, or the folders of runs that were trained separately. Runs that differ only
    in their seed form one row, and the report compares each row with the first row."""
    out: Path | None = None
    """The folder for a report on separately trained runs. A report on a sweep is always written to
    the sweep's folder."""
    split: Literal["dev", "test"] | None = None
    """Analyze only this set. By default, a report analyzes both sets, and its answers use the test
    set if it was scored."""
    baseline: str | None = None
    """The row that the others are compared with. Default: the first row."""
    argument_name = "a sweep, or runs"

    def run(self) -> None:
        from transformer_jax.api import report
        from transformer_jax.reports.answers import summarize
        from transformer_jax.reports.footnotes import list_footnotes
        from transformer_jax.reports.report import summary_table

        made = report(self.folders, self.out, split=self.split, baseline=self.baseline)
        folder = made.save()
        print_table(summary_table(made.results))
        stdout.print("\n".join(summarize(made.results)))
        stdout.print("\n".join(list_footnotes(made.results)))
        stdout.print(f"written to {folder}")
