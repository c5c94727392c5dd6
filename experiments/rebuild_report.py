"""Write a published report again, in the current format, from its stored scores.

    python -m experiments.rebuild_report experiments/results/table3-tiny

In the folder, `runs.csv` contains the scores of every run. `archive.json` contains the commands
and the FLOPs of each row. The report contains no p-values of single seeds, which would require the
translations. The command replaces the report's tables and `ratios.svg`. It does not replace
`curves.svg`, because the metrics of the runs were not kept.
"""

import csv
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tyro.conf import Positional

from transformer_jax.baselines.build import count_parameters
from transformer_jax.commands.arguments import parse, parse_program
from transformer_jax.commands.sweeps import Sweep as SweepCommand
from transformer_jax.console import run_and_report
from transformer_jax.data.splits import Split
from transformer_jax.errors import storage_errors
from transformer_jax.files import JsonObject, read_json
from transformer_jax.reports.footnotes import STATISTICS
from transformer_jax.reports.report import write_report
from transformer_jax.reports.results import BleuDifference, Results, RowResult
from transformer_jax.sweeps.plan import Origin, Sweep, plan_sweep
from transformer_jax.sweeps.status import RunStatus

REBUILT = ("table.md", "table.csv", "table.tex", "comparisons.csv", "ratios.svg")
LINK = f"../../../{STATISTICS}"
# The names of the scores in `RowResult` and in `runs.csv`.
SCORES = {
    "perplexity": "dev_perplexity",
    "bleu": "dev_bleu",
    "test_perplexity": "test_perplexity",
    "test_bleu": "test_bleu",
}
# The scores of a row are complete, so no run is listed as missing.
NO_SCORES: Mapping[Split, JsonObject] = {"dev": {}}


def collect_stored(folder: Path, path: Path) -> Results:
    """Return the results that a report's folder stores, as those of a sweep in `path`."""
    archive = read_json(folder / "archive.json")
    command = parse("sweep", SweepCommand, shlex.split(archive["sweep"])[2:])
    runs_file = folder / "runs.csv"
    with (
        storage_errors(f"{runs_file} cannot be read"),
        runs_file.open(encoding="utf-8", newline="") as file,
    ):
        runs = {line["run"]: line for line in csv.DictReader(file)}
    planned = plan_sweep(path, command.load_rows(), command.seeds, only=command.rows or None)
    sweep = replace(planned, origins=[Origin(*x) for x in archive["origins"]])
    rows = {name: _collect_row(sweep, name, archive["rows"][name], runs) for name in sweep.rows}
    base = next(iter(rows.values())).scores["test_bleu"]
    differences = {
        name: {
            seed: BleuDifference(score - base[seed], None)
            for seed, score in row.scores["test_bleu"].items()
        }
        for name, row in list(rows.items())[1:]
    }
    return Results(sweep, rows, differences, "", archive["report"])


def _collect_row(
    sweep: Sweep, name: str, stored: JsonObject, lines: Mapping[str, Mapping[str, str]]
) -> RowResult:
    row, base = sweep.rows[name], next(iter(sweep.rows.values()))
    runs = [run for run in sweep.runs if run.row == name]
    changes = base.config.differences(row.config).items()
    return RowResult(
        name,
        ", ".join(f"{key} {value}" for (_, key), (_, value) in changes),
        row.config,
        row.paper,
        count_parameters(row.config)["total"],
        (stored["flops"], stored["time_x_peak"]),
        [
            RunStatus(run, "done", step=int(lines[run.name]["step"]), scores=NO_SCORES)
            for run in runs
        ],
        {k: {run.seed: float(lines[run.name][x]) for run in runs} for k, x in SCORES.items()},
        unigram=None,
        failed={},
        is_control=False,
        has_other_text=False,
    )


def rebuild(folder: Positional[Path]) -> None:
    """Replace the tables and the figure of differences in a report's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        # The report's title and notes contain the sweep's name.
        results = collect_stored(folder, Path(temporary) / folder.name)
        # The archive does not contain the runs' metrics, so their folders are empty.
        for run in results.sweep.runs:
            run.path.mkdir(parents=True)
        report = write_report(results)
        table = report / "table.md"
        text = table.read_text("utf-8").replace(f"- {STATISTICS}", f"- [{STATISTICS}]({LINK})")
        table.write_text(text, "utf-8")
        for name in REBUILT:
            shutil.copyfile(report / name, folder / name)


if __name__ == "__main__":
    prog = "python -m experiments.rebuild_report"
    sys.exit(run_and_report(lambda: parse_program(prog, rebuild)))
