"""Ablations: `sweep`, `status`, `report`."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax.commands.base import ConfigCommand, PathCommand
from transformer_jax.commands.tables import format_duration, print_results, print_statuses
from transformer_jax.config import Row, loading
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.errors import SweepFailedError, UsageError
from transformer_jax.sweeps.resources import Resources

if TYPE_CHECKING:
    from transformer_jax.sweeps import plan


@dataclass(frozen=True)
class Sweep(ConfigCommand):
    """Train all rows of an ablation, each from several random seeds, here or by Slurm.

    What is finished is not done again: the same command goes on with what is not.
    """

    files: Positional[
        Annotated[
            tuple[str, ...], arg(metavar="CONFIG...", help_behavior_hint="(required, and first)")
        ]
    ] = ()
    """Config files, FILE:ROW, or names of shipped configs, such as table3: the sweep has the rows
    of all of them. The others are compared with the first row."""
    scale: Literal["full", "half", "small", "tiny"] = "full"
    """Divide the width and depth of all models: half by 2 and 1, small by 4 and 2, tiny by 8 and
    2."""
    rows: tuple[str, ...] = ()
    """Of the rows, these alone, beside the first."""
    seeds: int = 3
    """How many random seeds each row is trained from: a row with one proves nothing."""
    out: Path | None = None
    """The sweep's folder; sweeps/NAME where it is not said."""
    launcher: Literal["local", "slurm"] = "local"
    """Where runs go: to the devices of this machine, while this command waits, or to Slurm."""
    slurm: Resources = field(default_factory=Resources)
    devices: str = "all"
    """How many accelerators, one run on each at a time; on a CPU how many runs side by side."""
    step_timeout: float = 60.0
    """Of silence between two steps, at least, until a run is taken for stuck and ended."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Say what would be trained, and what it takes; do nothing."""
    retry_failed: FlagCreatePairsOff[bool] = False
    """Try again what failed."""

    def load_rows(self) -> dict[str, Row]:
        from transformer_jax.sweeps.plan import scaled

        rows: dict[str, Row] = {}
        for spec in self.files:
            for key, row in loading.load_rows(spec).items():
                name = key or loading.run_name(spec)
                if rows.setdefault(name, row) != row:
                    raise UsageError(f"{spec} has a row {name!r} that differs from an earlier one")
        return scaled(self.with_sections(rows), self.scale)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.sweeps import launch, plan

        # NaN is refused too.
        if not self.step_timeout > 0:
            raise UsageError(f"--step-timeout must be positive, got {self.step_timeout}")
        name = loading.run_name(self.files[0])
        sweep = plan.plan_sweep(
            self.out or Path("sweeps") / name, rows, self.seeds, only=self.rows or None
        )
        if self.launcher == "slurm":
            self._submit(sweep)
            return
        if self.slurm != Resources():
            raise UsageError("options of Slurm's, as --slurm.time, need --launcher slurm")
        places = launch.slots(None if self.devices == "all" else _whole(self.devices, "--devices"))
        stdout.print(f"{_size(sweep)}, {len(places)} at a time")
        if self.dry_run:
            seconds = launch.estimates(sweep, len(places))
            _print_needs(sweep, seconds)
            total = len(sweep.seeds) * sum(seconds.values()) / len(places)
            stdout.print(
                f"about {format_duration(total)} in all, at {launch.USUAL_UTILIZATION:.0%} of what is here; "
                f"scoring comes on top"
            )
            return
        sweep.store()
        _settle_submitted(sweep)
        _prepare(sweep)
        states = launch.launch(
            sweep,
            places,
            stderr.print,
            retry_failed=self.retry_failed,
            step_timeout=self.step_timeout,
        )
        print_statuses(states)
        _check_done(states)

    def _submit(self, sweep: "plan.Sweep") -> None:
        from transformer_jax.sweeps import slurm

        if self.devices != "all":
            raise UsageError("with --launcher slurm, --slurm.max-parallel takes --devices' place")
        together = f"{self.slurm.max_parallel} at a time"
        if self.dry_run:
            stdout.print(f"{_size(sweep)} by Slurm, {together}")
            _print_needs(sweep, {})
            stdout.print(
                f"GPUs of each: {self.slurm.gpus}; each saves and queues again after "
                f"{self.slurm.time}. How long one takes in all depends on Slurm's devices."
            )
            return
        slurm.check_here()
        sweep.store()
        # Nodes often cannot reach what it is fetched from.
        _prepare(sweep)
        jobs = slurm.submit(
            sweep, self.slurm, retry_failed=self.retry_failed, step_timeout=self.step_timeout
        )
        if jobs:
            number, is_array, _ = jobs[0].partition("_")
            kind = f"array {number} ({len(jobs)} tasks, {together})"
            told = kind if is_array else f"job {number} (1 task)"
            stdout.print(f"submitted {told}; this terminal may be closed")
            stdout.print(f"next: {shell_command('status', sweep.path)}")
        else:
            stdout.print("nothing to submit: what is unfinished waits or runs already, or failed")
            Status(str(sweep.path)).run()


@dataclass(frozen=True)
class Status(PathCommand):
    """Show how each run of a sweep stands, from its files alone."""

    sweep_folder: Positional[Annotated[str, arg(metavar="SWEEP")]]
    """A sweep's folder."""
    argument_name = "a sweep"

    def run(self) -> None:
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.status import read_status

        states = [read_status(run) for run in Sweep.open(Path(self.sweep_folder)).runs]
        print_statuses(states)
        _check_done(states)


@dataclass(frozen=True)
class Report(PathCommand):
    """Write a sweep's table: our figures beside the paper's, with spread and significance."""

    folders: Positional[Annotated[tuple[str, ...], arg(metavar="SWEEP|RUN...")]] = ()
    """A sweep's folder; or those of runs made by hand, of which the first is what the others are
    compared with. Runs that differ by their seed alone are one row."""
    out: Path | None = None
    """Of runs made by hand: the folder for their report."""
    argument_name = "a sweep, or runs"

    def run(self) -> None:
        from transformer_jax.sweeps.adhoc import collect_runs
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.report import footnotes, write_report
        from transformer_jax.sweeps.results import collect_results

        paths = [Path(folder) for folder in self.folders]
        if not paths:
            raise UsageError("report begins with a sweep, or runs")
        if (paths[0] / "run.json").exists() or len(paths) > 1:
            if self.out is None:
                raise UsageError("a report of runs wants a place: say --out FOLDER")
            found = collect_results(collect_runs(paths, self.out))
        elif self.out is not None:
            raise UsageError("a sweep has its report inside: --out is for runs made by hand")
        else:
            found = collect_results(Sweep.open(paths[0]))
        folder = write_report(found)
        print_results(found)
        for told in footnotes(found):
            stdout.print(told)
        stdout.print(f"kept in {folder}")


def _size(sweep: "plan.Sweep") -> str:
    return f"{len(sweep.rows)} rows x {len(sweep.seeds)} seeds = {len(sweep.runs)} runs"


def _print_needs(sweep: "plan.Sweep", seconds: Mapping[str, float]) -> None:
    """Show what each row takes, where that is known, and all of them on disk."""
    from transformer_jax.sweeps.launch import stored_bytes

    stored = {name: stored_bytes(row.config) / 1e9 for name, row in sweep.rows.items()}
    for name, size in stored.items():
        takes = f"about {format_duration(seconds[name])} and" if name in seconds else "about"
        stdout.print(f"  {name:8} {takes} {size:.2f} GB a run")
    home = next(path for path in sweep.path.absolute().parents if path.exists())
    free = shutil.disk_usage(home).free / 1e9
    stdout.print(
        f"about {len(sweep.seeds) * sum(stored.values()):.1f} GB on disk (free: {free:.0f})"
    )


def _prepare(sweep: Any) -> None:
    """Make text ready, once for all rows that share it, before any of them waits for it."""
    from transformer_jax.data.prepare import prepare

    with progress_bar() as progress:
        for data in {row.config.data: None for row in sweep.rows.values()}:
            prepare(data, progress=progress)


def _settle_submitted(sweep: "plan.Sweep") -> None:
    """Make free for this machine what Slurm was to do and has no more."""
    from transformer_jax.sweeps import slurm
    from transformer_jax.sweeps.status import read_status

    if any(read_status(run).status == "submitted" for run in sweep.runs):
        slurm.reconcile(sweep)


def _check_done(states: Sequence[Any]) -> None:
    failed = [state.run.name for state in states if state.status == "failed"]
    if failed:
        raise SweepFailedError(
            f"{len(failed)} of {len(states)} runs failed: {', '.join(failed)}; the same command "
            f"with --retry-failed tries them again"
        )


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} must be a number, or all, got {text!r}") from None
