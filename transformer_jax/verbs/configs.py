"""Looking at experiments without running them: `params`."""

import json
from dataclasses import dataclass

from rich.table import Table
from tyro.conf import FlagCreatePairsOff

from transformer_jax import configfiles
from transformer_jax.config import Row
from transformer_jax.console import OUT
from transformer_jax.verbs.base import ConfigArgument, ConfigVerb


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
