"""Looking at experiments without running them: `params`, `diff`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax.commands.base import ConfigArgument, ConfigCommand, PathCommand
from transformer_jax.config import Config, Row, loading
from transformer_jax.console import stdout


@dataclass(frozen=True)
class Params(ConfigCommand):
    """Count parameters, by module or for all rows of a sweep; nothing is allocated."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as table3."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""

    @classmethod
    def load_rows(cls, spec: str) -> dict[str, Row]:
        return loading.load_rows(spec)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.model.build import build_transformer
        from transformer_jax.model.inspect import parameter_counts

        counts = {
            name: parameter_counts(
                build_transformer(row.config.model, data.vocab_size, data.source_vocab_size)
            )
            for name, row in rows.items()
            for data in [row.config.data]
        }
        first = next(iter(counts.values()))
        if self.json:
            stdout.print(json.dumps(first if len(counts) == 1 else counts))
        elif len(counts) == 1:
            width = max(map(len, first))
            for module, count in first.items():
                stdout.print(f"{module:{width}}  {count:>13,}")
        else:
            table = Table("row", "parameters", "to base", "paper, M", "to base", box=None)
            base = next(iter(rows))
            for name, row in rows.items():
                ours = counts[name]["total"]
                theirs, theirs_base = row.paper.parameters, rows[base].paper.parameters
                table.add_row(
                    name,
                    f"{ours:,}",
                    f"{(ours - counts[base]['total']) / 1e6:+.2f} M",
                    f"{theirs:g}" if theirs else "",
                    f"{theirs - theirs_base:+g}" if theirs and theirs_base else "",
                )
            for column in table.columns[1:]:
                column.justify = "right"
            stdout.print(table)


@dataclass(frozen=True)
class Diff(PathCommand):
    """Show in which fields two configs, or two runs, differ."""

    first: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """A config file, FILE:ROW of a sweep, the name of a shipped one, or a run's folder."""
    second: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """The other one."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON: by field the two values."""
    argument_name = "two configs or runs"

    def run(self) -> None:
        (ours, our_versions), (theirs, their_versions) = map(_described, (self.first, self.second))
        found = {
            f"{section}.{key}": values
            for (section, key), values in ours.differences(theirs).items()
        }
        if our_versions and their_versions:
            found |= {
                f"made with {name}": (version, their_versions.get(name))
                for name, version in our_versions.items()
                if version != their_versions.get(name)
            }
        if self.json:
            stdout.print(json.dumps(found))
        elif not found:
            stdout.print("no difference")
        else:
            table = Table("", self.first, self.second, box=None)
            for name, values in found.items():
                table.add_row(name, *map(str, values))
            stdout.print(table)


def _described(spec: str) -> tuple[Config, dict[str, Any]]:
    """Return the config that is meant; of a run also what it was made with, and its data."""
    path = Path(spec)
    if not path.is_dir():
        return loading.load_config(spec), {}
    from transformer_jax.runs.run_directory import RunDirectory

    folder = RunDirectory.open(path)
    return folder.config, folder.versions
