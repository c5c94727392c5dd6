"""Runs that were made by hand, as if a sweep had made them: for a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.config import Config, Row
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.sweeps.plan import PlannedRun, Sweep


@dataclass(frozen=True)
class FoundRun(PlannedRun):
    """A run that lies somewhere."""

    folder: Path
    is_planned = False

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def path(self) -> Path:
        return self.folder


@dataclass(frozen=True)
class Gathered(Sweep):
    """Rows of runs that were found; `path` is where the report's folder will be."""

    found: Sequence[FoundRun]

    @property
    def runs(self) -> list[PlannedRun]:
        return list(self.found)


def collect_runs(paths: Sequence[Path], out: Path) -> Gathered:
    """Return these runs as rows: those that differ by seed alone are one row.

    Args:
        paths: the runs' folders; the first one's row is what the others are compared with.
        out: where the report shall be: a folder of reports alone, or none yet.

    Raises:
        UsageError: one is no run, or is named twice; two are the same experiment from the same
            seed; or two were trained on other text or by another vocabulary, so that their
            perplexities cannot be compared.
        StorageError: something else is at `out`.
    """
    if out.exists() and not (out / "report" / "table.csv").exists():
        raise StorageError(f"{out} is there already, and is no report: name another by --out")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run is named twice")
    names: dict[Config, str] = {}
    found = []
    folders = [RunDirectory.open(path) for path in paths]
    for folder in folders:
        if folder.fingerprint != folders[0].fingerprint:
            raise UsageError(
                f"{folder.path} was trained on other text than {folders[0].path}, or by another "
                f"vocabulary: their perplexities cannot be compared"
            )
        config = folder.config
        same = config.change(train={"seed": 0})
        if same not in names:
            path = folder.path.resolve()
            names[same] = path.name if path.name not in names.values() else str(path)
        if any((run.row, run.seed) == (names[same], config.train.seed) for run in found):
            raise UsageError(f"{folder.path} is another run's experiment, from the same seed")
        found.append(FoundRun(out, names[same], config.train.seed, config, folder.path))
    rows = {names[config]: Row(config) for config in names}
    return Gathered(out, rows, sorted({run.seed for run in found}), found)
