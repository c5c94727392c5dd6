"""Looking at experiments without running them: `params`, `diff`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax import configfiles
from transformer_jax.config import Config, Row
from transformer_jax.console import OUT
from transformer_jax.verbs.base import ConfigArgument, ConfigVerb, FolderVerb


@dataclass(frozen=True)
class Params(ConfigVerb):
    """Count parameters, by module or for all rows of a sweep; nothing is allocated."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as table3."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""

    @classmethod
    def experiments(cls, spec: str) -> dict[str, Row]:
        return configfiles.load_rows(spec)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.model.transformer import Transformer, parameter_counts

        counts = {
            name: parameter_counts(
                Transformer(row.config.model, data.vocab_size, data.source_vocab_size)
            )
            for name, row in rows.items()
            for data in [row.config.data]
        }
        first = next(iter(counts.values()))
        if self.json:
            OUT.print(json.dumps(first if len(counts) == 1 else counts))
        elif len(counts) == 1:
            width = max(map(len, first))
            for module, count in first.items():
                OUT.print(f"{module:{width}}  {count:>13,}")
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
            OUT.print(table)


@dataclass(frozen=True)
class Diff(FolderVerb):
    """Show in which fields two configs, or two runs, differ."""

    first: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """A config file, FILE:ROW of a sweep, the name of a shipped one, or a run's folder."""
    second: Positional[Annotated[str, arg(metavar="CONFIG|RUN")]]
    """The other one."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON: by field the two values."""
    subject = "two configs or runs"

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
            OUT.print(json.dumps(found))
        elif not found:
            OUT.print("no difference")
        else:
            table = Table("", self.first, self.second, box=None)
            for name, values in found.items():
                table.add_row(name, *map(str, values))
            OUT.print(table)


def _described(spec: str) -> tuple[Config, dict[str, Any]]:
    """Return the config that is meant; of a run also what it was made with, and its data."""
    path = Path(spec)
    if not path.is_dir():
        return configfiles.load_config(spec), {}
    from transformer_jax.runs.folder import RunFolder

    folder = RunFolder.open(path)
    return folder.config, folder.made_with
