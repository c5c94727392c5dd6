"""Python functions that train, sweep, and report like the commands of the same names."""

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from transformer_jax.backend import standard_settings, start_backend
from transformer_jax.config import Config, Row
from transformer_jax.config.loading import check_not_importing, load_config, load_rows, merge_rows
from transformer_jax.config.rows import FieldValue, with_control
from transformer_jax.config.validation import checked
from transformer_jax.console import progress_bar, shell_command, stderr, stdout
from transformer_jax.data.prepare import prepare_text
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup
from transformer_jax.errors import Setting, SweepFailedError, UsageError
from transformer_jax.files import expand_path
from transformer_jax.inference.summary import html_table
from transformer_jax.inference.trained_run import Run, load_folder, note_changed_files
from transformer_jax.registry import describe_foreign
from transformer_jax.remote.copies import find_url, local_path, publish
from transformer_jax.remote.session import commit, is_training, training
from transformer_jax.reports import tables
from transformer_jax.reports.collect import collect_results, collect_runs, read_adhoc_statuses
from transformer_jax.reports.footnotes import list_footnotes
from transformer_jax.reports.report import (
    list_comparisons,
    make_run_table,
    summary_table,
    write_report,
)
from transformer_jax.reports.results import Results, ScoredSplit
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.runs.versions import source_commit
from transformer_jax.sweeps import slurm
from transformer_jax.sweeps.launch import choose_group_sizes, launch
from transformer_jax.sweeps.plan import Origin, Sweep, plan_sweep
from transformer_jax.sweeps.slots import find_slots
from transformer_jax.sweeps.status import RunStatus, check_finished, read_status
from transformer_jax.sweeps.tuning import choose_values, open_trials, plan_tuning
from transformer_jax.training.create_run import create_run, open_run
from transformer_jax.training.loop import Callback, run_training
from transformer_jax.training.tracking import check_trackers

if TYPE_CHECKING:
    import pandas as pd

Configs = str | Sequence[str] | Mapping[str, Config | Row]
"""Config files, names of shipped configs, or a mapping from the names of rows to their configs."""


@checked
def train(
    config: Config | str,
    path: str | Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    callback: Callback | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model, store it in a run's folder, and return it.

    Args:
        config: a config, a config file, or the name of a shipped config.
        path: the run's folder.
        resume: if the folder already contains this run, continue it instead of raising an error. A
            finished run does not change.
        init_from: a run whose vocabulary and latest parameters initialize the new run.
        callback: a function that receives each report, such as `{"step": 100, "train/loss": 2.5}`.
        quiet: do not print progress.

    Returns:
        The run. Its parameters are the mean of its last `decode.average_checkpoints` checkpoints,
        or of all its checkpoints if there are fewer.

    Raises:
        UsageError: the folder already exists, or contains a run with a different config.
        DataError: the text cannot be used.
        DivergedError: the loss or gradient was not finite in several consecutive steps, or a score
            on the development set is not finite.
        OutOfMemoryError: the device does not have enough memory.
        BackendError: JAX cannot start.
        RunInterrupted: a signal, such as Ctrl-C, ended training. The run can be resumed.
        StorageError: the folder cannot be read or written.
    """
    check_not_importing("train")
    if isinstance(config, str):
        config = load_config(config)
    folder, num_scheduled = train_folder(
        config, local_path(path), resume=resume, init_from=init_from, callback=callback, quiet=quiet
    )
    count = max(min(num_scheduled, folder.config.decode.average_checkpoints), 1)
    return load_folder(folder, count)


@standard_settings()
def train_folder(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    callback: Callback | None = None,
    quiet: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[RunFolder, int]:
    """Train like `train`, in one or more processes, but do not load the trained model.

    Return the run's folder and the number of scheduled checkpoints on disk.
    """
    # The primary process holds the lease of a run in a bucket.
    with training(path) if group.is_primary else contextlib.nullcontext():
        group.barrier()
        if group.all_true(group.is_primary or is_training(path)):
            quiet = quiet or not group.is_primary
            source = None if init_from is None else local_path(init_from)
            with contextlib.nullcontext() if quiet else progress_bar():
                folder = _open_or_create(config, path, resume, source, quiet, group)
            # The primary process stores the new config after all processes have read the old one.
            group.barrier()
            console = Console(quiet=True) if quiet else stdout
            return folder, run_training(folder, console, group, callback)
    # An error in one process ends all processes, so first let the primary one release its lease.
    group.barrier()
    raise UsageError(
        f"the processes that train {path} need one cache: set TRANSFORMER_JAX_CACHE to a folder on "
        "a disk that all machines share"
    )


def _open_or_create(
    config: Config, path: Path, resume: bool, source: Path | None, quiet: bool, group: ProcessGroup
) -> RunFolder:
    # Only the primary process checks whether the run exists, because it might create the run before
    # the other processes check.
    exists = group.broadcast(resume and (path / "run.json").exists())
    check_trackers(config.train.trackers)
    stored = RunFolder.open(path) if exists else None
    # Start JAX before writing any file, because JAX fails if the selected platform is unavailable.
    start_backend(None if stored is None else stored.cpu_threads)
    if stored is not None:
        if group.is_primary:
            note_changed_files(stored)
        return open_run(path, config, init_from=source)
    if source is not None and group.count > 1:
        raise UsageError(
            "a run in several processes cannot start with the parameters of another run: "
            "train one step in one process (",
            Setting("train.steps", 1),
            "), and then resume the run in several processes",
        )
    if group.is_primary:
        create_run(config, path, Console(quiet=True) if quiet else stderr, init_from=source)
        commit(path)
    group.barrier()
    return RunFolder.open(path)


@checked
def sweep(
    configs: Configs,
    path: str | Path,
    *,
    seeds: int = 3,
    rows: Sequence[str] | None = None,
    control: bool = False,
    tune: tuple[str, Sequence[FieldValue]] | None = None,
    devices: int | None = None,
    group: int | None = None,
    runs_per_device: int = 1,
    retry_failed: bool = False,
    quiet: bool = False,
) -> Sweep:
    """Train all rows in an ablation on this machine, with several seeds for each row.

    The same call resumes an interrupted sweep, without repeating finished runs.

    Args:
        configs: config files with rows, or a mapping from the names of rows to their configs.
        path: the sweep's folder, or its URL in a bucket.
        seeds: the number of random seeds for each row.
        rows: train only the first row and the rows with these names.
        control: also train a copy of the first row with other seeds, so that the report shows how
            large a difference the seeds alone can cause.
        tune: a config field and at least two values, such as `("train.learning_rate_scale", [0.5,
            1])`. For each row, the sweep trains a run with each value, and then uses the value with
            the lowest perplexity on the development set.
        devices: the number of accelerators to use or, on a CPU, the number of concurrent runs.
            Default: as many as possible.
        group: the number of runs that train in one program. These runs must differ only in their
            seeds and numeric settings. Default: on accelerators, as many as the memory allows; on a
            CPU, 1.
        runs_per_device: the number of processes that share each GPU and divide its memory.
        retry_failed: also retrain the runs that failed.
        quiet: do not print progress.

    Raises:
        UsageError: the folder contains a sweep with different configs, or an argument is invalid.
        DataError: the text cannot be used.
        StorageError: a folder cannot be read or written, or a dataset cannot be downloaded.
        RunInterrupted: a signal ended the sweep. All runs are saved.
        SweepFailedError: a run failed.
    """
    check_not_importing("sweep")
    named = with_control(read_rows(configs)) if control else read_rows(configs)
    tuning = None if tune is None else plan_tuning(named, *tune)
    planned = plan_sweep(local_path(path), named, seeds, only=rows, tuning=tuning)
    planned = replace(planned, origins=[Origin("transformer_jax.sweep", source_commit())])
    options = {"group": group, "runs_per_device": runs_per_device, "retry_failed": retry_failed}
    check_finished(launch_sweep(planned, devices, quiet=quiet, **options))
    return Sweep.open(planned.path) if tuning else planned


def read_rows(configs: Configs) -> dict[str, Row]:
    """Return the rows of config files, or the given configs as rows, keyed by name.

    Raises:
        UsageError: there are no rows, or two files have different rows with the same name.
    """
    if not configs:
        raise UsageError("a sweep needs at least one row")
    if isinstance(configs, Mapping):
        return {k: v if isinstance(v, Row) else Row(v) for k, v in configs.items()}
    specs = [configs] if isinstance(configs, str) else configs
    return merge_rows((spec, load_rows(spec)) for spec in specs)


def launch_sweep(
    planned: Sweep,
    devices: int | None = None,
    *,
    group: int | None = None,
    runs_per_device: int = 1,
    retry_failed: bool = False,
    step_timeout: float = 60.0,
    quiet: bool = False,
) -> list[RunStatus]:
    """Store a planned sweep, and then run its trials and runs; return the status of every run.

    A run that sends no heartbeat for `step_timeout` seconds is stopped. The timeout is longer if
    the run's steps are slow. The other arguments are those of `sweep`.
    """
    check_importable(planned)
    if group is not None and group < 1:
        raise UsageError(f"group must be positive, got {group}")
    is_remote = find_url(planned.path) is not None
    if is_remote and group is not None and group > 1:
        raise UsageError(
            "a sweep in a bucket trains one run in each program: omit ", Setting("group", group)
        )
    slots = find_slots(devices, runs_per_device)
    say = Console(quiet=True).print if quiet else stderr.print
    planned.store()
    if any(read_status(run).status == "submitted" for run in planned.all_runs):
        # If a Slurm job no longer exists, mark its run as stopped, so that this machine trains it.
        slurm.reconcile(replace(planned, runs=planned.all_runs))
    with contextlib.nullcontext() if quiet else progress_bar():
        notes = prepare_texts(planned)
    for note in notes:
        say(note)
    options = {"retry_failed": retry_failed, "step_timeout": step_timeout}

    def launch_all(part: Sweep) -> list[RunStatus]:
        size = 1 if is_remote else group
        sizes = dict.fromkeys(part.rows, size) if size else choose_group_sizes(part, slots)
        return launch(part, slots, say, group_sizes=sizes, **options)

    if (trials := open_trials(planned)).runs:
        launch_all(trials)
        planned = choose_values(planned)
        planned.store()
        if unscored := [run.name for run in open_trials(planned).runs]:
            raise SweepFailedError(f"these trials have no score: {', '.join(unscored)}")
    # If all trials of a row diverged, `runs` contains these trials. They have just ended, so do not
    # train them again.
    launch_all(replace(planned, runs=[run for run in planned.runs if not run.is_trial]))
    return [read_status(run) for run in planned.runs]


def check_importable(planned: Sweep) -> None:
    """Raise a UsageError if a row uses a part that other processes cannot import."""
    for row in planned.rows.values():
        check_trackers(row.config.train.trackers)
        trackers = [describe_foreign({"train.trackers": x}) for x in row.config.train.trackers]
        parts = [describe_foreign(row.config.parts()), *trackers]
        for field, part in itertools.chain(*(x.items() for x in parts)):
            if "file" not in part:
                raise UsageError(
                    f"{field} {part['name']!r} is not registered by a file, so the processes of a "
                    "sweep cannot import it: move it to a file, and import that file"
                )


def prepare_texts(planned: Sweep) -> list[str]:
    """Prepare each text once, before the runs that use it start, and return warnings."""
    configs = [row.config for row in planned.rows.values()]
    notes: dict[str | None, None] = {}
    for data in {config.data: None for config in configs}:
        longest = max((x for x in configs if x.data == data), key=lambda x: x.train.steps)
        prepared = prepare_text(data)
        prepared.note_problems()
        notes[prepared.batches(longest).describe_repetition(longest.train.steps)] = None
    notes |= dict.fromkeys(config.describe_warmup() for config in configs)
    return [note for note in notes if note]


class Report:
    """The results of a sweep, or of runs that were trained separately.

    In a notebook, a report is displayed as a table. Each row is compared with the first row.
    """

    def __init__(self, results: Results) -> None:
        """Wrap collected results."""
        self.results = results

    def __str__(self) -> str:
        table = tables.to_markdown(summary_table(self.results), align=True)
        return "\n".join([table, "", *list_footnotes(self.results)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(summary_table(self.results))

    @checked
    def to_pandas(self, *, per_run: bool = False) -> "pd.DataFrame":
        """Return the unrounded differences from the first row, with intervals and p-values.

        If `per_run` is true, return the unrounded scores of every run instead. This method needs
        pandas.
        """
        import pandas as pd

        table = (make_run_table if per_run else list_comparisons)(self.results)
        # A row can have a name such as "null".
        file = io.StringIO(tables.to_csv(table))
        return pd.read_csv(file, na_values=[tables.MISSING, ""], keep_default_na=False)

    def save(self) -> Path:
        """Write the report's tables, figures, and page, and return their folder.

        Raises:
            StorageError: the folder cannot be written.
        """
        folder = write_report(self.results)
        publish(folder)
        return folder


@checked
def report(
    paths: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    split: ScoredSplit | None = None,
    baseline: str | None = None,
) -> Report:
    """Compare the rows in a sweep, or separately trained runs, with each other and the paper.

    Args:
        paths: a sweep's folder, or the folders of runs. Runs that differ only in their seed form
            one row.
        out: the folder in which to write a report on separately trained runs. `Report.save` writes
            a sweep's report to its folder.
        split: analyze only this set. By default, a report analyzes both sets, and its answers use
            the test set if it was scored.
        baseline: the row that all others are compared with. Default: the first row.

    Raises:
        UsageError: no run has finished, the runs cannot be compared, `out` is missing for runs, or
            `baseline` is not a row or is a control.
        StorageError: a sweep or a run cannot be read.
    """
    options = [
        x for k, v in {"split": split, "baseline": baseline}.items() if v for x in (f"--{k}", v)
    ]
    folders = [local_path(x) for x in ([paths] if isinstance(paths, str | Path) else paths)]
    if not folders:
        raise UsageError("report needs a sweep's folder, or the folders of runs")
    if (folders[0] / "run.json").exists() or len(folders) > 1:
        if out is None:
            raise UsageError("a report of runs needs a folder: ", Setting("out", "FOLDER"))
        planned = collect_runs(folders, Path(expand_path(str(out))))
        statuses = read_adhoc_statuses(planned)
        command = shell_command("report", *folders, "--out", planned.path, *options)
    elif out is not None:
        raise UsageError(
            "a sweep's report is written to the sweep's folder: omit ", Setting("out", str(out))
        )
    else:
        planned = Sweep.open(folders[0])
        statuses = [read_status(run) for run in planned.runs]
        command = shell_command("report", planned.path, *options)
    if baseline is not None:
        if baseline not in planned.rows:
            raise UsageError(f"no row {baseline!r} (available: {', '.join(planned.rows)})")
        if planned.rows[baseline].is_control:
            raise UsageError(f"row {baseline!r} is a control: choose the row that it copies")
        rows = {baseline: planned.rows[baseline], **planned.rows}
        planned = replace(planned, rows=rows)
    return Report(collect_results(planned, statuses, command, split))
