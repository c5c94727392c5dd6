"""Plot and tabulate the scores of a finished sweep by sentence length.

The command needs a sweep with scored runs, or the table from an earlier report:

    python -m experiments.positions SWEEP [--edges 8 16 24] [--out FOLDER]
    python -m experiments.positions table.csv [--out FOLDER]
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from experiments.positions.report import draw_figure, to_csv, to_markdown
from experiments.positions.study import read_scores, score_by_length
from experiments.provenance import describe_sweep
from transformer_jax.commands.arguments import parse_program
from transformer_jax.console import run_and_report, stdout
from transformer_jax.errors import UsageError, storage_errors
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.visualization.style import Picture


def write_report(
    sweep: Positional[Path], out: Path | None = None, edges: tuple[int, ...] = ()
) -> None:
    """Write a figure and tables of scores by sentence length.

    Args:
        sweep: a sweep's folder, or the table.csv of an earlier report. Given a table, the command
            only redraws the figure.
        out: the folder for the files. Default: SWEEP/extrapolation, SWEEP/by-length if no bucket
            ends at L or beyond, or the folder of table.csv.
        edges: the upper bounds of the length buckets, in tokens. Default: multiples of L / 2, in
            which L is the maximum length of a training sentence.
    """
    is_table = sweep.suffix == ".csv"
    if edges and (is_table or min(edges) < 1):
        problem = f"{sweep} already has buckets" if is_table else "an edge must be at least 1"
        raise UsageError(f"--edges {shlex.join(map(str, edges))}: {problem}")
    tables: dict[str, str] = {}
    if is_table:
        study = read_scores(sweep)
    else:
        runs = Sweep.open(sweep)
        study = score_by_length(runs, edges)
        options = ["--edges", *map(str, edges)] if edges else []
        command = shlex.join(["python", "-m", "experiments.positions", str(sweep), *options])
        text = to_markdown(study, describe_sweep(runs, command))
        tables |= {"table.md": text, "table.csv": to_csv(study)}
    stem = "extrapolation" if study.reaches_limit else "by-length"
    folder = out or (sweep.parent if is_table else sweep / stem)
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for form in ("svg", "png"):
            Picture(draw_figure(study)).save(folder / f"{stem}.{form}")
        for name, content in tables.items():
            (folder / name).write_text(content, "utf-8")
    if not is_table:
        stdout.print(tables["table.md"])
    stdout.print(f"saved in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print any error as one line."""
    return run_and_report(
        lambda: parse_program("python -m experiments.positions", write_report, arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
