"""Draw how translations fare by length, from the runs of a sweep that is done.

python -m experiments.positions SWEEP [--out FOLDER]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from experiments.positions.report import comma_separated, drawn, markdown
from experiments.positions.study import study
from transformer_jax.console import run_and_report, stdout
from transformer_jax.errors import StorageError
from transformer_jax.sweeps.plan import Sweep


def write(sweep: tyro.conf.Positional[Path], out: Path | None = None) -> None:
    """Draw scores by length, and tell them in tables.

    Args:
        sweep: a sweep's folder.
        out: where the files go; SWEEP/extrapolation where it is not said.
    """
    folder = out or sweep / "extrapolation"
    found = study(Sweep.open(sweep))
    contents = {
        "table.md": markdown(found).encode(),
        "table.csv": comma_separated(found).encode(),
        **{f"extrapolation.{form}": drawn(found, form) for form in ("svg", "png")},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    stdout.print(contents["table.md"].decode())
    stdout.print(f"kept in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code. A mistake or a fault is one line."""
    return run_and_report(
        lambda: tyro.cli(write, prog="python -m experiments.positions", args=arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
