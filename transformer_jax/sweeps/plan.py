"""Plan a sweep: the rows in an ablation, each trained with several random seeds.

A sweep's folder contains:

    sweeps/table3/
        sweep.json           the plan: seeds, row configs, and the paper's results
        base/seed-0/         a run folder
        base/seed-0.json     the run's config, which `train` reads
        base/seed-0.log      the output of the run's commands
        base/seed-0.state    the run's status
        tune/base/0.5/       trials of a value that the sweep chooses for a row (see `tuning`)
        slurm/               submitit's scripts, logs, and pickle files, if the sweep uses Slurm
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from transformer_jax.config import Config, Paper, Row
from transformer_jax.config.rows import FieldValue, split_field
from transformer_jax.errors import ConfigError, Setting, StorageError, UsageError, storage_errors
from transformer_jax.files import (
    INVALID_JSON,
    JsonObject,
    check_no_links,
    check_utf8,
    find_free_path,
    is_file,
    is_stray,
    lock_folder,
    read_json,
    write_json,
)
from transformer_jax.registry import check_registered, describe_foreign
from transformer_jax.remote.copies import uploading
from transformer_jax.remote.session import planning

MAX_SEEDS = 10_000
# Increase this number when the format of sweep.json changes.
FORMAT = 2
# A row's name is also the name of its folder.
ROW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# Sweeps use this name for a row without a name, such as that of a file with only one config.
UNNAMED = "run"
# The separator in a list of run names. Row names cannot contain this character.
NAME_SEPARATOR = ","
# The difference between a control's seeds and those of the other rows. Trials use a third set of
# seeds.
CONTROL_SEED_OFFSET = 20_000


@dataclass(frozen=True)
class SweepRun:
    """One run in a sweep, for one row and one seed. The run's files may not exist yet."""

    path: Path
    """The run folder."""
    name: str
    """The run's name in tables and messages, such as "base/seed-0"."""
    row: str
    """The row's name."""
    seed: int
    config: Config
    """The row's config with this run's seed."""
    is_trial: bool = False
    """Whether this is a trial, which helps to choose a value and is not scored on the test set."""

    @property
    def config_file(self) -> Path:
        """The config file that `train` reads."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def log_file(self) -> Path:
        """The file that contains the output of the run's commands."""
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def status_file(self) -> Path:
        """The JSON file in which workers and launchers record the run's status."""
        return self.path.with_name(f"{self.path.name}.state")


class Origin(NamedTuple):
    """A command that added rows or seeds to a sweep."""

    command: str
    commit: str
    """This package's commit, or "" if the package is not in a clone of its repository."""

    def __str__(self) -> str:
        return f"{self.command} (commit {self.commit})" if self.commit else self.command


@dataclass(frozen=True)
class Tuning:
    """A config field whose value a sweep chooses for each row by development-set perplexity."""

    field: str
    """The field's name, such as "train.learning_rate_scale"."""
    values: tuple[FieldValue, ...]
    seeds: tuple[int, ...]
    """The seeds of the trials. Each value is tried with all of these seeds."""
    chosen: Mapping[str, FieldValue] = field(default_factory=dict)
    """The values that have been chosen so far, keyed by row."""

    def extends(self, other: "Tuning") -> bool:
        """Return whether this tuning has all trials of another one, and perhaps further values."""
        is_similar = replace(self, values=other.values, chosen=other.chosen) == other
        return is_similar and {*self.values} >= {*other.values}

    def with_choices(self, earlier: "Tuning") -> "Tuning":
        """Add the choices of an earlier tuning, unless this one has further values to try."""
        is_complete = {*self.values} == {*earlier.values}
        return replace(self, chosen={**earlier.chosen, **self.chosen}) if is_complete else self


@dataclass(frozen=True)
class Sweep:
    """The rows in an ablation and their runs."""

    path: Path
    """The sweep's folder."""
    rows: Mapping[str, Row]
    """The rows, keyed by name. Reports compare each of the other rows with the first row."""
    runs: Sequence[SweepRun]
    origins: Sequence[Origin] = ()
    """The commands that planned the sweep."""
    tuning: Tuning | None = None
    """The field whose value is chosen per row. `rows` contains the configs before the choice."""

    @property
    def trials(self) -> list[SweepRun]:
        """The trials of all rows, which determine the values."""
        return [] if self.tuning is None else _plan_trials(self.path, self.rows, self.tuning)

    @property
    def all_runs(self) -> list[SweepRun]:
        """The trials, and then all other runs."""
        return [*self.trials, *self.runs]

    def choose(self, chosen: Mapping[str, FieldValue]) -> "Sweep":
        """Return the sweep with the values that have been chosen for these rows."""
        if self.tuning is None:
            return self
        tuning = replace(self.tuning, chosen={**self.tuning.chosen, **chosen})
        runs = _plan_runs(self.path, self.rows, self.seeds, tuning)
        return replace(self, runs=runs, tuning=tuning)

    @property
    def seeds(self) -> list[int]:
        """The seeds of all runs except trials and those of a control, in ascending order."""
        runs = [run for run in self.runs if not run.is_trial]
        return sorted({run.seed for run in runs if not self.rows[run.row].is_control})

    def find(self, name: str) -> SweepRun:
        """Return the run with this name; raise UsageError if the sweep has no such run."""
        for run in self.all_runs:
            if run.name == name:
                return run
        raise UsageError(f"{self.path} has no run {name!r}")

    def store(self) -> None:
        """Write the plan to the sweep's folder, merging it into any existing plan."""
        # Another command, which can be on another machine, may add rows at the same time.
        with planning(self.path):
            if is_free(self.path):
                with storage_errors(f"{self.path} cannot be written"):
                    self.path.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.path if self.path.is_dir() else self.path.parent, waits=True):
                self._merge()

    def open_stored(self) -> "Sweep | None":
        """Return the sweep in this sweep's folder, or None if the folder is free.

        Raises:
            UsageError: the folder is not a sweep, or its sweep has another tuning or other configs.
        """
        if is_free(self.path):
            return None
        stored = Sweep.open(self.path)
        if not _can_continue(stored.tuning, self.tuning):
            raise UsageError(
                f"the sweep in {self.path} tunes {_describe_tuning(stored.tuning)}, but this one "
                f"tunes {_describe_tuning(self.tuning)}: choose another folder (",
                Setting("out", "FOLDER", "path"),
                ")",
            )
        for name in stored.rows.keys() & self.rows.keys():
            _check_unchanged(self.path, name, stored.rows[name], self.rows[name])
        return stored

    def _merge(self) -> None:
        rows, seeds, origins, tuning = self.rows, self.seeds, self.origins, self.tuning
        stored = self.open_stored()
        if stored is not None:
            rows, seeds = {**stored.rows, **rows}, sorted({*stored.seeds, *seeds})
            if tuning is not None and stored.tuning is not None:
                tuning = tuning.with_choices(stored.tuning)
                new_choices = tuning.chosen.keys() - stored.tuning.chosen.keys()
                _check_values(self.path, rows, seeds, tuning, new_choices)
            origins = dict.fromkeys([*stored.origins, *origins])
        plan = {
            name: {
                "config": row.config.to_dict(),
                "paper": asdict(row.paper),
                **({"is_control": True} if row.is_control else {}),
                **({"parts": parts} if (parts := describe_foreign(row.config.parts())) else {}),
            }
            for name, row in rows.items()
        }
        # Another command may have chosen values since this sweep was planned. It may also have
        # chosen values for rows that are not in this sweep.
        chosen: Mapping[str, FieldValue] = {} if tuning is None else tuning.chosen
        runs = self.choose({row: x for row, x in chosen.items() if row in self.rows}).runs
        new = {
            run.config_file: run.config.to_dict()
            for run in [*self.trials, *runs]
            if run.is_trial or tuning is None or find_tuned(rows, run.row) in tuning.chosen
            if not run.config_file.exists()
        }
        names = ["sweep.json", *(path.relative_to(self.path).as_posix() for path in new)]
        problem = f"{self.path} cannot be written"
        with uploading(self.path, names), storage_errors(problem):
            made_by = [origin._asdict() for origin in origins]
            content = {"format": FORMAT, "origins": made_by, "seeds": seeds, "rows": plan}
            content |= {} if tuning is None else {"tuning": asdict(tuning)}
            write_json(self.path / "sweep.json", content)
            for path, config in new.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, config)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the plan in a sweep's folder."""
        file = path / "sweep.json"
        if not is_file(file):
            raise UsageError(f"{path} is not a sweep: it has no sweep.json")
        try:
            check_no_links(path, lambda name: name == file.name)
            plan = read_json(file)
            if plan["format"] != FORMAT:
                raise StorageError(
                    f"{file} has format {plan['format']!r}, but this version reads format {FORMAT}"
                )
            check_registered(path, *(row.get("parts", {}) for row in plan["rows"].values()))
            rows = {
                check_row_name(name): Row(
                    Config.from_dict(row["config"]),
                    Paper(**row["paper"]),
                    bool(row.get("is_control", False)),
                )
                for name, row in plan["rows"].items()
            }
            # The files of each run are checked when its status is read. In `slurm/`, submitit
            # creates links, which this package does not follow.
            check_no_links(path, lambda name: name not in {*rows, "slurm"})
            tuning = _read_tuning(plan["tuning"], rows) if "tuning" in plan else None
            runs = _plan_runs(path, rows, map(int, plan["seeds"]), tuning)
            origins = [Origin(**x) for x in plan.get("origins", ())]
            return cls(path, rows, runs, origins, tuning)
        except (OSError, KeyError, AttributeError, ConfigError, *INVALID_JSON) as error:
            raise StorageError(f"{file} cannot be read: {error}") from error


def _read_tuning(data: JsonObject, rows: Mapping[str, Row]) -> Tuning:
    values, seeds = tuple(data["values"]), tuple(map(int, data["seeds"]))
    chosen = {row: value for row, value in data["chosen"].items() if row in rows}
    tuning = Tuning(str(data["field"]), values, seeds, chosen)
    for value in (*values, *chosen.values()):
        check_row_name(str(value))
    return tuning


def _can_continue(stored: Tuning | None, tuning: Tuning | None) -> bool:
    if stored is None or tuning is None:
        return stored is tuning
    return tuning.extends(stored)


def _describe_tuning(tuning: Tuning | None) -> str:
    if tuning is None:
        return "nothing"
    values, seeds = (" ".join(map(str, x)) for x in (tuning.values, tuning.seeds))
    return f"{tuning.field} ({values}; seeds {seeds})"


def choose_folder(path: Path, rows: Mapping[str, Row], tuning: Tuning | None = None) -> Path:
    """Return `path`, or add a number to it if the sweep in `path` cannot include these rows."""
    rows = _with_same_batch_shapes(rows)

    def is_same(one: Row, other: Row) -> bool:
        return one.config == other.config and one.is_control == other.is_control

    def accepts(path: Path) -> bool:
        if is_free(path):
            return True
        stored = Sweep.open(path)
        return (
            _can_continue(stored.tuning, tuning)
            and next(iter(stored.rows)) == next(iter(rows))
            and all(is_same(stored.rows[x], rows[x]) for x in stored.rows.keys() & rows)
        )

    return find_free_path(path, accepts, is_folder=True)


def is_free(path: Path) -> bool:
    """Return whether a path is missing or an empty folder, which a full disk can leave behind."""
    with storage_errors(f"{path} cannot be read"):
        return not path.exists() or (
            path.is_dir() and all(is_stray(x.name) for x in path.iterdir())
        )


def plan_sweep(
    path: Path,
    rows: Mapping[str, Row],
    seeds: int,
    *,
    only: Sequence[str] | None = None,
    tuning: Tuning | None = None,
) -> Sweep:
    """Plan a sweep without writing files.

    The sweep contains the first row, controls, and the rows in `only`, or all rows if `only` is
    None. The seeds are consecutive, starting with the first row's seed. With `tuning`, the values
    that were chosen for an existing sweep are kept.
    """
    # The folder's files are text and contain its path.
    check_utf8(path, "choose another one")
    check_num_seeds("seeds", seeds)
    names = select_rows(rows, only).keys()
    if {"", UNNAMED} <= rows.keys():
        raise UsageError(f"the row without a name and another row would both be {UNNAMED!r}")
    base, rows = next(iter(rows)), _with_same_batch_shapes(rows)
    selected = {check_row_name(name or UNNAMED): row for name, row in rows.items() if name in names}
    first = rows[base].config.train.seed
    if tuning is not None and not is_free(path):
        stored = Sweep.open(path).tuning
        if stored is not None and tuning.extends(stored):
            chosen = tuning.with_choices(stored).chosen
            tuning = replace(tuning, chosen={row: chosen[row] for row in chosen if row in selected})
    runs = _plan_runs(path, selected, range(first, first + seeds), tuning)
    return Sweep(path, selected, runs, tuning=tuning)


def select_rows(rows: Mapping[str, Row], only: Sequence[str] | None) -> dict[str, Row]:
    """Return the first row, controls, and the rows in `only`, or all rows if `only` is None."""
    for name in only or ():
        if name not in rows:
            raise UsageError(f"no row {name!r} (available: {', '.join(rows)})")
    chosen = {next(iter(rows)), *(rows if only is None else only)}
    return {name: row for name, row in rows.items() if name in chosen or row.is_control}


def check_num_seeds(name: str, count: int) -> None:
    """Raise a UsageError if a sweep cannot have this number of seeds."""
    if not 1 <= count <= MAX_SEEDS:
        raise UsageError(f"{name} must be from 1 to {MAX_SEEDS}, got {count}")


def _with_same_batch_shapes(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Use the first row's number of batch shapes in all rows that do not set the number."""
    shapes = next(iter(rows.values())).config.with_batch_shapes().data.max_batch_shapes
    return {k: replace(row, config=row.config.with_batch_shapes(shapes)) for k, row in rows.items()}


def _plan_runs(
    path: Path, rows: Mapping[str, Row], seeds: Iterable[int], tuning: Tuning | None
) -> list[SweepRun]:
    configs = {name: row.config for name, row in rows.items()}
    if tuning is not None:
        chosen = tuning.chosen.items()
        configs |= {row: configs[row].with_fields({tuning.field: x}) for row, x in chosen}
    controls = {name for name, row in rows.items() if row.is_control}
    configs |= {name: configs[find_copied(rows, name)] for name in controls}
    # Train every row with one seed before moving on to the next seed, so that even an unfinished
    # sweep has results for every row.
    return [
        SweepRun(path / run, run, name, seed, config.change(train={"seed": seed}))
        for block in seeds
        for name, config in configs.items()
        for seed in [block + CONTROL_SEED_OFFSET * (name in controls)]
        for run in [f"{name}/seed-{seed}"]
    ]


def find_copied(rows: Mapping[str, Row], control: str) -> str:
    """Return the name of the row that a control copies."""
    config = rows[control].config
    copied = (name for name, row in rows.items() if row.config == config and not row.is_control)
    if (name := next(copied, None)) is None:
        raise UsageError(f"row {control} is a control, but no other row has the same config")
    return name


def find_tuned(rows: Mapping[str, Row], name: str) -> str:
    """Return the row whose trials determine a row's value: for a control, the row it copies."""
    return find_copied(rows, name) if rows[name].is_control else name


def _check_values(
    path: Path,
    rows: Mapping[str, Row],
    seeds: Iterable[int],
    tuning: Tuning,
    new_choices: Collection[str],
) -> None:
    """Raise a UsageError if rows with a new choice have runs that were planned with another one."""
    section, key = split_field(tuning.field)
    changed = {
        run.row: f"{run.row} ({tuning.chosen[row]})"
        for run in _plan_runs(path, rows, seeds, tuning)
        for row in [find_tuned(rows, run.row)]
        if row in new_choices and run.config_file.exists()
        if read_json(run.config_file).get(section, {}).get(key) != tuning.chosen[row]
    }
    if changed:
        raise UsageError(
            f"with more values of {tuning.field}, the best value has changed for these rows in "
            f"{path} (new value in parentheses): {', '.join(changed.values())}; to train them "
            "again, move their folders elsewhere and repeat the command"
        )


def _plan_trials(path: Path, rows: Mapping[str, Row], tuning: Tuning) -> list[SweepRun]:
    return [
        SweepRun(path / run, run, name, seed, config.change(train={"seed": seed}), is_trial=True)
        for seed in tuning.seeds
        for value in tuning.values
        for name, row in rows.items()
        if not row.is_control
        for config in [row.config.with_fields({tuning.field: value})]
        for run in [f"tune/{name}/{value}/seed-{seed}"]
    ]


def check_row_name(name: str) -> str:
    """Return a row's name, or raise UsageError if it is not a valid folder name."""
    if not ROW_NAME.fullmatch(name):
        raise UsageError(f"a row's name must consist of letters, digits, and ._+-, got {name!r}")
    if is_stray(name):
        # The files in this row's folder would not be uploaded to a bucket.
        raise UsageError(f"a row's name must not look like that of a temporary file, got {name!r}")
    return name


def _check_unchanged(path: Path, name: str, stored: Row, given: Row) -> None:
    if stored.is_control != given.is_control:
        # Controls have other seeds, so the runs that the sweep has trained would not count.
        kind = "a control" if stored.is_control else "not a control"
        raise UsageError(f"row {name} in {path} is {kind}: rename the new row")
    changes = ", ".join(
        f"{section}.{key} {before!r} -> {after!r}"
        for (section, key), (before, after) in stored.config.differences(given.config).items()
    )
    if changes:
        raise UsageError(
            f"the sweep in {path} has row {name} with a different config ({changes}): choose "
            f"another folder (",
            Setting("out", "FOLDER", "path"),
            ") or rename the row",
        )
