"""Convert the percent scripts in this folder to Jupyter notebooks, and execute the notebooks.

    make notebooks
    python notebooks/build.py 1_the_model

Edit the scripts, not the generated notebooks. To build only some notebooks, pass the names of their
scripts as arguments. The `notebooks` dependency group lists the required packages.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).parent
TIMEOUT = 600
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def convert(script: Path) -> "NotebookNode":
    """Convert a percent script to a notebook without outputs."""
    import jupytext

    notebook = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        # By default, cell IDs are random, so every build would change every cell.
        cell.id = f"cell-{number}"
        cell.metadata = {}
    return notebook


def execute(notebook: "NotebookNode") -> None:
    """Execute a notebook in this folder, and store its outputs in the notebook.

    Raises:
        ValueError: a cell writes to standard error.
        CellExecutionError: a cell raises an error.
    """
    from nbclient import NotebookClient

    notebook.metadata = METADATA
    NotebookClient(
        notebook,
        timeout=TIMEOUT,
        resources={"metadata": {"path": str(FOLDER)}},
        # Do not store execution times, and merge outputs that were split into several messages.
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    # The kernel adds its version to the metadata, so restore the original metadata.
    notebook.metadata = METADATA
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise ValueError(f"a cell writes to standard error: {cell.source}\n{output.text}")


def main(names: list[str]) -> None:
    """Build the notebooks with these names, or all notebooks if no names are given."""
    scripts = {script.stem: script for script in sorted(FOLDER.glob("[0-9]_*.py"))}
    if unknown := [name for name in names if name not in scripts]:
        sys.exit(f"no script {', '.join(unknown)} (available: {', '.join(scripts)})")
    import nbformat

    for name, script in scripts.items():
        if not names or name in names:
            notebook = convert(script)
            execute(notebook)
            nbformat.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
