"""Commands that inspect experiments without running them: `params` and `diff`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax.commands.base import FileCommand, PathCommand
from transformer_jax.commands.tables import print_parameter_totals, show_table
from transformer_jax.config import Config, Row, loading
from transformer_jax.console import stdout
from transformer_jax.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Params(FileCommand):
    """Count the parameters in each module of a model, or in each row of a sweep.

    This command computes only the parameters' shapes, so it needs little memory.
    """

    json: FlagCreatePairsOff[bool] = False
    """Print the parameter counts as JSON."""

    def load_rows(self) -> dict[str, Row]:
        return self.with_sections(loading.load_rows(self.file), self.file)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.baselines.build import count_parameters

        counts = {name: count_parameters(row.config) for name, row in rows.items()}
        first = next(iter(counts.values()))
        if self.json:
            stdout.print(json.dumps(first if len(counts) == 1 else counts))
        elif len(counts) == 1:
            width = max(map(len, first))
            for module, count in first.items():
                stdout.print(f"{module:{width}}  {count:>13,}")
        else:
            print_parameter_totals({name: c["total"] for name, c in counts.items()}, rows)


@dataclass(frozen=True)
class Diff(PathCommand):
    """Show how two configs or runs differ."""

    first: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """A config file, FILE:ROW for one row in a sweep, the name of a shipped config, or a run's
    folder."""
    second: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """The config or run to compare with the first one."""
    json: FlagCreatePairsOff[bool] = False
    """Print a JSON object that maps each difference to both values."""
    argument_name = "two configs or runs"

    def run(self) -> None:
        config, versions = _load_config_or_run(self.first)
        other_config, other_versions = _load_config_or_run(self.second)
        fields = config.differences(other_config).items()
        differences: dict[str, tuple[object, object]] = {".".join(k): v for k, v in fields}
        if versions and other_versions:
            differences |= {
                f"made with {name}": (versions.get(name), other_versions.get(name))
                for name in versions | other_versions
                if versions.get(name) != other_versions.get(name)
            }
        table = Table("", self.first, self.second, box=None)
        for name, values in differences.items():
            table.add_row(name, *map(str, values))
        if self.json:
            stdout.print(json.dumps(differences))
        elif differences:
            show_table(table)
        else:
            stdout.print("no difference")


def _load_config_or_run(spec: str) -> tuple[Config, dict[str, str]]:
    """Return the config that `spec` names, and the `versions` of a run if it names a run."""
    path = Path(spec)
    is_shipped = spec in {file.stem for file in loading.shipped_configs().glob("[a-z]*.py")}
    # A folder that is not a run may have the same name as a shipped config.
    if not path.is_dir() or (is_shipped and not (path / "run.json").exists()):
        return loading.load_config(spec), {}
    run = RunFolder.open(path)
    return run.config, run.versions
