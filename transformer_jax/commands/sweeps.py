"""The `sweep` command, which trains the rows in an ablation."""

import shutil
import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from transformer_jax.commands.arguments import as_option
from transformer_jax.commands.base import ConfigCommand
from transformer_jax.commands.reports import Status
from transformer_jax.commands.tables import format_duration, print_statuses
from transformer_jax.compilation.environment import configure_environment
from transformer_jax.compilation.targets import Target, parse_target
from transformer_jax.config import Row, loading
from transformer_jax.config.rows import (
    Scale,
    check_distinct,
    grid_rows,
    parse_value,
    scale_rows,
    split_field,
    with_control,
)
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.errors import UsageError
from transformer_jax.files import write_text
from transformer_jax.remote.copies import find_url
from transformer_jax.sweeps.resources import Cluster, Resources

if TYPE_CHECKING:
    from transformer_jax.sweeps import plan


@dataclass(frozen=True)
class Sweep(ConfigCommand):
    """Train all rows in an ablation with several random seeds, here or on a cluster.

    The same command resumes an interrupted sweep, without repeating finished runs.
    """

    files: Positional[
        Annotated[
            tuple[str, ...], arg(metavar="CONFIG...", help_behavior_hint="(required, and first)")
        ]
    ] = ()
    """Config files, FILE:ROW, or names of shipped configs such as table3. The sweep contains all
    rows of these configs. A report compares each row with the first row."""
    scale: Scale = "full"
    """Shrink all models. `half` divides the width by 2. `small` divides the width by 4 and the
    depth by 2. `tiny` divides the width by 8 and the depth by 2."""
    grid: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE,VALUE")]] = ()
    """Train a row for each combination of values. Repeat the option for each field:
    `--grid model.num_layers=2,4,6 --grid model.d_k=16,32`. The report then
    contains main effects, matched contrasts, and interactions."""
    rows: tuple[str, ...] = ()
    """Train only the first row and the rows with these names."""
    seeds: int = 3
    """Number of random seeds per row. A single seed is not enough to show that rows differ."""
    control: FlagCreatePairsOff[bool] = False
    """Also train a copy of the first row with other seeds. The report then shows
    how large a difference the seeds alone can cause."""
    tune: Annotated[tuple[str, ...], arg(metavar="FIELD VALUE VALUE...")] = ()
    """Choose the value of a field, such as `train.learning_rate_scale 0.5 1 2`, for each row. Each
    row gets --tune-seeds trials for each value. The row's other runs use the value whose trials
    have the lowest perplexity on the development set. Trials have their own seeds."""
    tune_seeds: int = 1
    """Number of trials for each value of --tune and each row."""
    out: Annotated[Path | None, arg(metavar="SWEEP")] = None
    """The sweep's folder, which can be gs://BUCKET/NAME or s3://BUCKET/NAME. Default: sweeps/NAME,
    where NAME is the first config's name. If that folder contains a sweep with different configs,
    the default is sweeps/NAME-2, and so on."""
    launcher: Literal["local", "slurm", "skypilot", "kubernetes"] = "local"
    """`local` trains on this machine's devices and waits until all runs end.
    `slurm` submits the runs to Slurm. `skypilot` and `kubernetes` store the
    sweep in a bucket and write a YAML file that starts a job for each run."""
    slurm: Resources = field(default_factory=Resources)
    cluster: Cluster = field(default_factory=Cluster)
    devices: int | None = None
    """Number of accelerators to use. On a CPU, the option sets the number of
    concurrent workers. Default: as many as possible."""
    group: int | None = None
    """Number of runs that train in one program on one device. The runs in a group differ only in
    their seeds and numeric settings. On accelerators, a group trains faster than its runs would one
    after the other. Default: on accelerators, as many as the memory allows; on a CPU, 1. Grouping
    changes a run's results only by rounding."""
    runs_per_device: int = 1
    """Number of processes that share each GPU and divide its memory. Use this
    option if single runs do not keep a GPU busy and cannot form groups."""
    step_timeout: float = 60.0
    """Stop a run that sends no heartbeat for this many seconds. The timeout is longer if the run's
    steps are slow. A run sends a heartbeat after every three steps."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Print the number of runs and the resources they need, without training. With
    --launcher skypilot or kubernetes: print the YAML file."""
    target: Annotated[str | None, arg(metavar="TARGET")] = None
    """With --dry-run: print how many of these devices each row needs. Examples
    of targets are v5e:2x4 and h100:8; see the compile command."""
    retry_failed: FlagCreatePairsOff[bool] = False
    """Also retrain the runs that failed."""

    def load_rows(self) -> dict[str, Row]:
        loaded = ((spec, loading.load_rows(spec)) for spec in self.files)
        rows = loading.merge_rows((spec, self.with_sections(x, spec)) for spec, x in loaded)
        # A grid's values, which are also the names of its rows, are not scaled.
        rows = scale_rows(rows, self.scale)
        if self.grid:
            if len(rows) > 1:
                names = ", ".join(rows)
                raise UsageError(
                    f"--grid needs a config with one row, such as FILE:ROW, got {names}"
                )
            rows = grid_rows(next(iter(rows.values())), self.grid)
        return with_control(rows) if self.control else rows

    def select(self, rows: dict[str, Row], loaded: Mapping[str, Row]) -> dict[str, Row]:
        from transformer_jax.sweeps.plan import select_rows

        for item in self.grid:
            section, key = split_field(item.partition("=")[0])
            if any((section, key) in loaded[x].config.differences(rows[x].config) for x in rows):
                option = as_option(f"{section}.{key}")
                raise UsageError(f"--grid already sets {section}.{key}: remove {option}")
        selected = select_rows(rows, self.rows or None)
        check_distinct(loaded, selected)
        return selected

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.runs.versions import source_commit
        from transformer_jax.sweeps.plan import Origin, choose_folder, plan_sweep

        if self.target is not None and not self.dry_run:
            raise UsageError("--target needs --dry-run, because it compiles but does not train")
        target = None if self.target is None else parse_target(self.target)
        # The negated comparison also rejects NaN.
        if not self.step_timeout > 0:
            raise UsageError(f"--step-timeout must be positive, got {self.step_timeout}")
        is_slurm, is_local = self.launcher == "slurm", self.launcher == "local"
        if is_slurm and self.devices is not None:
            raise UsageError("--launcher slurm takes --slurm.max-parallel instead of --devices")
        if not is_local and (self.group is not None or self.runs_per_device != 1):
            raise UsageError("--group and --runs-per-device need --launcher local")
        if self.group is not None and self.group < 1:
            raise UsageError(f"--group must be positive, got {self.group}")
        if not is_slurm and self.slurm != Resources():
            raise UsageError("options such as --slurm.time need --launcher slurm")
        if (is_slurm or is_local) and self.cluster != Cluster():
            raise UsageError(
                "options such as --cluster.image need --launcher kubernetes or skypilot"
            )
        default = Path("sweeps") / loading.run_name(self.files[0])
        tuning = self._plan_tuning(rows)
        folder = self.out or choose_folder(default, rows, tuning)
        url = find_url(folder)
        if is_slurm and url is not None:
            raise UsageError(f"--launcher slurm needs a folder on a shared disk, not {url}")
        if not (is_slurm or is_local or url):
            raise UsageError(
                f"--launcher {self.launcher} needs a bucket that all machines can access, such as "
                f"--out gs://BUCKET/{folder.name}, not the local folder {folder}"
            )
        sweep = plan_sweep(folder, rows, self.seeds, only=self.rows or None, tuning=tuning)
        if self.dry_run and url is None:
            sweep.open_stored()  # Raises the errors that storing the sweep would raise.
        if folder not in (self.out, default):
            stderr.print(
                f"{default} contains a sweep with different configs; this one is in {folder}"
            )
        command = shell_command(*self.arguments).encode(errors="backslashreplace").decode()
        sweep = replace(sweep, origins=[Origin(command, source_commit())])
        if target is not None:
            _print_device_counts(sweep, target, retry_failed=self.retry_failed)
        elif is_slurm:
            self._submit(sweep)
        elif self.launcher != "local":
            self._write_manifest(sweep, self.launcher, str(url))
        else:
            self._launch(sweep)

    def _plan_tuning(self, rows: Mapping[str, Row]) -> "plan.Tuning | None":
        from transformer_jax.sweeps.tuning import plan_tuning

        if not self.tune:
            if self.tune_seeds != 1:
                raise UsageError("--tune-seeds needs --tune")
            return None
        name, *values = self.tune
        parsed = [parse_value(name, value) for value in values]
        return plan_tuning(rows, ".".join(split_field(name)), parsed, self.tune_seeds)

    def _launch(self, sweep: "plan.Sweep") -> None:
        from transformer_jax.sweeps.slots import find_slots

        slots = find_slots(self.devices, self.runs_per_device)
        groups = f" x up to {self.group} runs" if (self.group or 1) > 1 else ""
        stdout.print(f"{_describe_size(sweep)}, {len(slots)}{groups} at a time")
        if self.dry_run:
            every = replace(sweep, runs=sweep.all_runs)
            _print_estimates(every, len(slots), retry_failed=self.retry_failed)
            return
        from transformer_jax.api import launch_sweep

        options = {"group": self.group, "runs_per_device": self.runs_per_device}
        retry, timeout = self.retry_failed, self.step_timeout
        statuses = launch_sweep(
            sweep, self.devices, retry_failed=retry, step_timeout=timeout, **options
        )
        print_statuses(statuses)
        stdout.print(f"next: {shell_command('report', sweep.path)}")

    def _write_manifest(self, sweep: "plan.Sweep", launcher: str, url: str) -> None:
        """Store a sweep in a bucket, and write the file that starts its unfinished runs."""
        from transformer_jax.sweeps import manifests, status

        imports = loading.import_arguments()[1::2]
        if outside := [name for name in imports if Path(name).is_absolute()]:
            raise UsageError(
                f"the jobs cannot import {outside[0]}: move it to the working directory, whose "
                "files the jobs read"
            )
        if not self.dry_run:
            from transformer_jax.api import check_importable

            check_importable(sweep)
            sweep.store()
        part = self._choose_part(sweep)
        wanted = [
            run.name
            for run in part.runs
            if status.read_status(run).needs_worker(retry_failed=self.retry_failed)
        ]
        file = Path(f"{sweep.path.name}.{launcher}.yaml")
        text = manifests.format_manifest(
            launcher,
            url,
            wanted,
            self.cluster,
            self.step_timeout,
            file.name,
            imports,
            suffix=time.strftime("-%m%d%H%M%S"),
        )
        if self.dry_run:
            stdout.out(text, end="", highlight=False)
            return
        write_text(file, text)
        stdout.print(
            f"runs in {file}: {len(wanted)}; its first lines contain the command that starts them"
        )
        _explain_trials(part)
        stdout.print(f"next: {shell_command('status', sweep.path)}")

    def _choose_part(self, sweep: "plan.Sweep") -> "plan.Sweep":
        """Return the part of a sweep whose runs can start: the open trials or, without any, all.

        First choose a value for each row whose trials have ended.
        """
        from transformer_jax.sweeps.tuning import choose_values, open_trials

        if open_trials(sweep).runs:
            sweep = choose_values(sweep, retry_failed=self.retry_failed)
            if not self.dry_run:
                sweep.store()
        trials = open_trials(sweep)
        return trials if trials.runs else sweep

    def _submit(self, sweep: "plan.Sweep") -> None:
        from transformer_jax.sweeps import slurm
        from transformer_jax.sweeps.tuning import open_trials

        parallel = f"{self.slurm.max_parallel} at a time"
        if self.dry_run:
            stdout.print(f"{_describe_size(sweep)} by Slurm, {parallel}")
            every = replace(sweep, runs=sweep.all_runs)
            _print_disk_space(every, retry_failed=self.retry_failed)
            stdout.print(
                f"GPUs per run: {self.slurm.gpus}. Each run saves and requeues itself after "
                f"{self.slurm.time}. The training time depends on the nodes."
            )
            return
        slurm.check_available()
        sweep.store()
        # Prepare the text on this machine, because compute nodes often have no network access.
        from transformer_jax.api import check_importable, prepare_texts

        check_importable(sweep)
        for note in prepare_texts(sweep):
            stderr.print(note)
        retry, timeout = self.retry_failed, self.step_timeout
        if open_trials(sweep).runs:
            slurm.reconcile(open_trials(sweep))
        part = self._choose_part(sweep)
        jobs = slurm.submit(part, self.slurm, retry_failed=retry, step_timeout=timeout)
        if not jobs:
            stdout.print("nothing to submit: all unfinished runs are pending, running, or failed")
            Status(str(sweep.path)).run()
            return
        number, is_array, _ = jobs[0].partition("_")
        array = f"array {number} ({len(jobs)} tasks, {parallel})"
        submitted = array if is_array else f"job {number} (1 task)"
        stdout.print(f"submitted {submitted}; you can close this terminal")
        _explain_trials(part)
        stdout.print(f"next: {shell_command('status', sweep.path)}")


def _explain_trials(part: "plan.Sweep") -> None:
    # If the part also contains other runs, its trials are those of rows that diverged with every
    # value.
    if all(run.is_trial for run in part.runs):
        stdout.print("when the trials have ended, repeat this command to train the rows")


def _describe_size(sweep: "plan.Sweep") -> str:
    rows, seeds = _count(sweep.rows, "row"), _count(sweep.seeds, "seed")
    size = f"{rows} x {seeds} = {_count(sweep.runs, 'run')}"
    return f"{_count(sweep.trials, 'trial')}, then {size}" if sweep.trials else size


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _format_limit(seconds: float) -> str:
    duration = format_duration(seconds)
    return duration if duration.startswith("less") else f"up to about {duration}"


def _print_estimates(sweep: "plan.Sweep", num_slots: int, *, retry_failed: bool) -> None:
    from transformer_jax.sweeps import estimates

    seconds = estimates.estimate_seconds(sweep, num_slots)
    _print_disk_space(sweep, seconds, retry_failed=retry_failed)
    remaining = estimates.remaining_runs(sweep, retry_failed=retry_failed)
    total = sum(seconds[name] * runs for name, runs in remaining.items()) / num_slots
    stdout.print(
        f"{_format_limit(total)} of training for the remaining "
        f"{sum(remaining.values()):.3g} of {len(sweep.runs)} runs, if training reaches "
        f"{estimates.ASSUMED_UTILIZATION:.0%} of this machine's peak; padding and short "
        "targets reduce the time, and compilation and scoring add to it"
    )


def _print_device_counts(sweep: "plan.Sweep", target: Target, *, retry_failed: bool) -> None:
    stdout.print(_describe_size(sweep))
    configure_environment(for_gpus=not target.is_tpu)
    from transformer_jax.sweeps.estimates import count_devices_of_rows, describe_counts

    with progress_bar():
        counts = count_devices_of_rows(sweep, target)
    stdout.print(describe_counts(counts, target))
    _print_disk_space(replace(sweep, runs=sweep.all_runs), retry_failed=retry_failed)


def _print_disk_space(
    sweep: "plan.Sweep", seconds: Mapping[str, float] | None = None, *, retry_failed: bool
) -> None:
    from transformer_jax.sweeps.estimates import estimate_bytes, remaining_runs

    gigabytes = {name: estimate_bytes(row.config) / 1e9 for name, row in sweep.rows.items()}
    times = {name: _format_limit(seconds[name]) for name in gigabytes} if seconds else {}
    width, time_width = (max(map(len, x), default=0) for x in (gigabytes, times.values()))
    for name, size in gigabytes.items():
        time = f"{times[name]:>{time_width}} and " if times else ""
        stdout.print(f"  {name:{width}}  {time}about {size:5.2f} GB per run")
    folder = sweep.path.absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(parent).free / 1e9
    remaining = remaining_runs(sweep, retry_failed=retry_failed)
    total = sum(gigabytes[name] * runs for name, runs in remaining.items())
    stdout.print(f"about {total:.1f} GB on disk (free: {free:.0f})")
    if total > free:
        stderr.print(
            f"warning: {total:.0f} GB does not fit in the {free:.0f} GB of free space: "
            "choose another --out, or fewer --rows or --seeds"
        )
