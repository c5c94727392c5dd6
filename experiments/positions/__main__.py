"""Plot and tabulate the scores of a finished sweep by sentence length.

The command needs a sweep with scored runs, or the table from an earlier report:

    python -m experiments.positions SWEEP [--out FOLDER]
    python -m experiments.positions table.csv [--out FOLDER]
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from experiments.positions.report import draw_figure, to_csv, to_markdown
from experiments.positions.study import read_scores, score_by_length
from experiments.provenance import describe_sweep
from transformer_jax.console import run_and_report, stdout
from transformer_jax.errors import storage_errors
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.visualization.style import Picture


def write_report(sweep: tyro.conf.Positional[Path], out: Path | None = None) -> None:
    """Write a figure and tables of scores by sentence length.

    Args:
        sweep: a sweep's folder, or the table.csv of an earlier report. Given a table, the command
            only redraws the figure.
        out: the folder for the files. Default: SWEEP/extrapolation, or the folder of table.csv.
    """
    is_table = sweep.suffix == ".csv"
    folder = out or (sweep.parent if is_table else sweep / "extrapolation")
    tables: dict[str, str] = {}
    if is_table:
        study = read_scores(sweep)
    else:
        runs = Sweep.open(sweep)
        study = score_by_length(runs)
        command = shlex.join(["python", "-m", "experiments.positions", str(sweep)])
        text = to_markdown(study, describe_sweep(runs, command))
        tables |= {"table.md": text, "table.csv": to_csv(study)}
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for form in ("svg", "png"):
            Picture(draw_figure(study)).save(folder / f"extrapolation.{form}")
        for name, content in tables.items():
            (folder / name).write_text(content, "utf-8")
    if not is_table:
        stdout.print(tables["table.md"])
    stdout.print(f"saved in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print any error as one line."""
    return run_and_report(
        lambda: tyro.cli(write_report, prog="python -m experiments.positions", args=arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
