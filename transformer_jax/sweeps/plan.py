"""What a sweep is: rows of an ablation, each trained from several random seeds.

sweeps/table3/
    sweep.json           rows in order: config, the paper's figures; seeds
    base/seed-0/         a run like any other
    base/seed-0.json     its config, from which `train` begins
    base/seed-0.log      what its commands printed
    base/seed-0.state    how it stands
    slurm/               scripts, logs and pickles of submitit, where Slurm does the runs
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformer_jax.config import Config, Paper, Row
from transformer_jax.errors import ConfigError, StorageError, UsageError
from transformer_jax.runs.atomic_files import write_json

FORMAT = 1
# By what width and depth are divided.
SCALES = {"full": (1, 1), "half": (2, 1), "small": (4, 2), "tiny": (8, 2)}
WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
# In bytes: what claims to be longer is none of ours, and is not read.
MAX_DESCRIPTION = 16 << 20
# A row's name is that of a folder.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class PlannedRun:
    """One row from one seed: where its files lie, whether they are there yet or not."""

    sweep: Path
    row: str
    seed: int
    config: Config
    is_planned: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """How it is called in tables and in commands."""
        return f"{self.row}/seed-{self.seed}"

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.sweep / self.row / f"seed-{self.seed}"

    @property
    def config_file(self) -> Path:
        """From which `train` begins."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def log(self) -> Path:
        """What its commands printed, one after the other."""
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def state(self) -> Path:
        """How it stands: JSON."""
        return self.path.with_name(f"{self.path.name}.state")


@dataclass(frozen=True)
class Sweep:
    """Rows and seeds, as `sweep.json` keeps them."""

    path: Path
    rows: Mapping[str, Row]
    seeds: Sequence[int]

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, one seed of every row before the next: a table that stops early is whole."""
        return [
            PlannedRun(self.path, name, seed, row.config.change(train={"seed": seed}))
            for seed in self.seeds
            for name, row in self.rows.items()
        ]

    def run(self, name: str) -> PlannedRun:
        """Return the run of this name.

        Raises:
            UsageError: there is none.
        """
        for run in self.runs:
            if run.name == name:
                return run
        raise UsageError(f"{self.path} has no run {name!r}")

    def store(self) -> None:
        """Make the sweep's folder, or make sure that the one there is of the same sweep.

        More rows and more seeds may be added to a sweep; none may change.

        Raises:
            UsageError: a row is there with another config, or something else is there.
            StorageError: the folder cannot be written.
        """
        if self.path.exists():
            there = Sweep.open(self.path)
            for name in there.rows.keys() & self.rows.keys():
                _check_same(self.path, name, there.rows[name].config, self.rows[name].config)
            rows = {**there.rows, **self.rows}
            merged = Sweep(self.path, rows, sorted({*there.seeds, *self.seeds}))
        else:
            merged = self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "sweep.json", merged._description())
            for run in self.runs:
                run.path.parent.mkdir(exist_ok=True)
                if not run.config_file.exists():
                    write_json(run.config_file, run.config.to_dict())
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seeds": list(self.seeds),
            "rows": {
                name: {"config": row.config.to_dict(), "paper": dataclasses.asdict(row.paper)}
                for name, row in self.rows.items()
            },
        }

    @classmethod
    def open(cls, path: Path) -> "Sweep":
        """Read a sweep's plan.

        Raises:
            UsageError: there is none.
            StorageError: it cannot be read, or is not as we write it.
        """
        file = path / "sweep.json"
        if not file.is_file():
            raise UsageError(f"{path} is no sweep: it has no sweep.json")
        try:
            if file.stat().st_size > MAX_DESCRIPTION:
                raise StorageError(f"{file} is too long")
            found = json.loads(file.read_text("utf-8"))
            if found["format"] != FORMAT:
                raise StorageError(f"{file} is of format {found['format']!r}, not {FORMAT}")
            rows = {
                checked_name(name): Row(Config.from_dict(row["config"]), Paper(**row["paper"]))
                for name, row in found["rows"].items()
            }
            return cls(path, rows, [int(seed) for seed in found["seeds"]])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise StorageError(f"{file} cannot be read: {error}") from error


def plan_sweep(
    path: Path, rows: Mapping[str, Row], seeds: int, *, only: Sequence[str] | None = None
) -> Sweep:
    """Return the sweep of these rows from so many seeds, beginning with each row's own.

    Args:
        path: where its folder is, or shall be.
        rows: by name; the first is the one that others are compared with.
        seeds: how many.
        only: of the rows, these, beside the first.

    Raises:
        UsageError: there is no such row, a name that no folder can have, or no seed.
    """
    if seeds < 1:
        raise UsageError(f"--seeds must be positive, got {seeds}")
    for name in only or ():
        if name not in rows:
            raise UsageError(f"no row {name!r} (there are {', '.join(rows)})")
    base = next(iter(rows))
    chosen = {
        checked_name(name or "run"): row
        for name, row in rows.items()
        if only is None or name in (base, *only)
    }
    first = rows[base].config.train.seed
    return Sweep(path, chosen, range(first, first + seeds))


def with_sections(rows: Mapping[str, Row], sections: Mapping[str, Config]) -> dict[str, Row]:
    """Return the same ablation of another experiment.

    Args:
        rows: the first is what the others are compared with.
        sections: by name, such as "data", the config whose section of that name is taken, but
            for what a row itself changes in it.

    Raises:
        ConfigError: a row cannot be so.
    """
    base = next(iter(rows.values())).config

    def move(row: Row) -> Row:
        own = base.differences(row.config)
        fields = {
            name: {
                **other.to_dict()[name],
                **{k: v for (s, k), (_, v) in own.items() if s == name},
            }
            for name, other in sections.items()
        }
        if "train" in fields:
            # A row that trains longer does so on any budget.
            ratio = row.config.train.steps / base.train.steps
            fields["train"]["steps"] = max(1, round(ratio * sections["train"].train.steps))
        return dataclasses.replace(row, config=row.config.change(**fields))

    return {name: move(row) for name, row in rows.items()}


def scaled(rows: Mapping[str, Row], scale: str) -> dict[str, Row]:
    """Return smaller models, in which every row keeps its ratio to the others.

    Widths and depth are divided, rounded up; heads stay as many as they are.
    """
    width, depth = SCALES[scale]

    def shrink(row: Row) -> Row:
        model = row.config.to_dict()["model"]
        smaller = {key: -(-model[key] // width) for key in WIDTHS}
        layers = {"num_layers": -(-model["num_layers"] // depth)}
        return dataclasses.replace(row, config=row.config.change(model={**smaller, **layers}))

    return {name: shrink(row) for name, row in rows.items()}


def checked_name(name: str) -> str:
    """Return a row's name, after making sure that it can be a folder's.

    Raises:
        UsageError: it cannot.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"a row's name is made of letters, digits and ._+-, got {name!r}")
    return name


def _check_same(path: Path, name: str, there: Config, given: Config) -> None:
    changes = [
        f"{section}.{key} {before!r} -> {after!r}"
        for (section, key), (before, after) in there.differences(given).items()
    ]
    if changes:
        raise UsageError(
            f"{path} has a row {name} with another {', '.join(changes)}: name another folder by "
            f"--out, or another row"
        )
