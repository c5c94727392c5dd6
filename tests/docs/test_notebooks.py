"""Test that the notebooks match their scripts and have clean outputs, and run the scripts."""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import ROOT, name

# Each of these packages exports names that are part of the stable API.
PUBLIC_PACKAGES = ("model", "data", "training")
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9]_*.py"))
NOTEBOOKS = [script.with_suffix(".ipynb") for script in SCRIPTS]
MAX_BYTES = 3 << 20
PICTURES = ("image/png", "image/svg+xml")
# Outputs that match this pattern would differ on another machine.
MACHINE = re.compile(
    r"(?<![\w.])/(home|root|tmp|usr|opt|work|Users|var)/|tok/s|\b\d+(\.\d+)? ?ms\b"
)


def cells_of_script(script: Path) -> list[tuple[str, str]]:
    """Return the kind and text of each cell in a percent-format script."""
    _, *parts = re.split(r"^# %%", script.read_text("utf-8"), flags=re.MULTILINE)
    cells = []
    for part in parts:
        header, _, body = part.partition("\n")
        if header.strip() == "[markdown]":
            body = re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
            cells.append(("markdown", body))
        else:
            assert not header.strip(), header
            cells.append(("code", body.strip()))
    return cells


def cells_of_notebook(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text("utf-8"))["cells"]


def outputs_of(notebook: Path) -> list[dict[str, Any]]:
    return [output for cell in cells_of_notebook(notebook) for output in cell.get("outputs", ())]


def texts_of(output: dict[str, Any]) -> list[str]:
    """Return all text in a cell output, except the data of PNG images."""
    data = {**output.get("data", {}), "text/stream": output.get("text", "")}
    return ["".join(text) for kind, text in data.items() if kind != "image/png"]


def test_a_script_that_does_not_exist_is_an_error() -> None:
    command = [sys.executable, str(FOLDER / "build.py"), "1_the_modle"]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 1
    assert build.stderr.startswith("no script 1_the_modle (available: 1_the_model, ")


def test_there_are_five_notebooks_below_three_megabytes() -> None:
    assert len(SCRIPTS) == 5
    assert sum(notebook.stat().st_size for notebook in NOTEBOOKS) < MAX_BYTES


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_notebook_equals_its_script(script: Path) -> None:
    cells = cells_of_notebook(script.with_suffix(".ipynb"))
    stored = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    assert stored == cells_of_script(script), "run `make notebooks`"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_a_notebook_was_executed_in_order_without_errors(notebook: Path) -> None:
    counts = [c["execution_count"] for c in cells_of_notebook(notebook) if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    for output in outputs_of(notebook):
        assert output["output_type"] != "error", output
        assert output.get("name") != "stderr", output


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_a_notebook_contains_pictures(notebook: Path) -> None:
    kinds = [kind for output in outputs_of(notebook) for kind in output.get("data", {})]
    assert sum(kind in PICTURES for kind in kinds) >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_outputs_name_neither_files_of_a_machine_nor_its_speed(notebook: Path) -> None:
    for output in outputs_of(notebook):
        for text in texts_of(output):
            assert not (found := MACHINE.search(text)), text[max(0, found.start() - 80) :][:200]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_runs_in_a_fresh_clone(script: Path, tmp_path: Path) -> None:
    tracked = ("notebooks", "experiments", "configs", "transformer_jax")
    for folder in tracked:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.ipynb"))
    hidden = ("JAX_NUMPY", "PYTEST_", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    # The notebooks store their runs in the temporary folder.
    environment |= {"MPLBACKEND": "agg", "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path / "notebooks",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_probe_equals_least_squares_on_augmented_rows(tmp_path: Path) -> None:
    # Ridge regression equals least squares with one more row, of sqrt(0.1), for each weight.
    tree = ast.parse((FOLDER / "3_attention.py").read_text("utf-8"))
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    module = tmp_path / "probe.py"
    module.write_text(f"import numpy as np\n\n{ast.unparse(functions['probe'])}\n", "utf-8")
    probe = runpy.run_path(str(module))["probe"]

    rng = np.random.default_rng(0)
    labels, test_labels = rng.integers(9, size=(2, 400))
    signal = np.stack([labels, test_labels])[..., None] == np.arange(9)
    x, test_x = signal + rng.normal(size=(2, 400, 9)) / 2
    few = slice(20)  # with few sentences, the penalty matters
    design = np.vstack([np.column_stack([x[few], np.ones(20)]), 0.1**0.5 * np.eye(10)])
    weights, *_ = np.linalg.lstsq(design, np.vstack([np.eye(9)[labels[few]], np.zeros((10, 9))]))
    predictions = (np.column_stack([test_x, np.ones(400)]) @ weights).argmax(-1)
    expected = np.mean(predictions == test_labels)
    assert 0.2 < expected < 0.9
    assert probe(x[few], labels[few], test_x, test_labels) == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_notebook_imports_only_public_names(script: Path) -> None:
    public = {
        package: set(importlib.import_module(package).__all__)
        for package in ("transformer_jax", *(f"transformer_jax.{x}" for x in PUBLIC_PACKAGES))
    }
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_jax"):
            assert {alias.name for alias in node.names} <= public[node.module or ""]
        if isinstance(node, ast.Import):
            names = {a.name for a in node.names if a.name.startswith("transformer_jax")}
            assert names <= set(public)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "tj" or node.attr in public["transformer_jax"]
