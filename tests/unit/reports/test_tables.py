"""Test that tables show every cell as plain text in each format."""

import csv
import io

from pictures import Page
from run_files import HOSTILE

from transformer_jax.reports.tables import to_csv, to_html, to_latex, to_markdown

TABLE = [["row", "change", "score"], ["a", HOSTILE, "-1.5"], ["b", "d_ff 33", "4.1 ± 0.1"]]


def test_markdown_escapes_cells() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[:2] == ["| row | change | score |", "| --- | --- | --- |"]
    assert lines[2].replace("\\", "") == f"| a | {HOSTILE} | -1.5 |".replace("\\", "")
    assert r"\<b\>" in lines[2]
    assert r"\|" in lines[2]


def test_aligned_markdown_has_columns_of_one_width() -> None:
    assert to_markdown([["name", "n"], ["x", "100"]], align=True).splitlines() == [
        "| name |   n |",
        "| ---- | --: |",
        "| x    | 100 |",
    ]


def test_latex_escapes_cells() -> None:
    latex = to_latex(TABLE)
    assert latex.count(r" \\") == len(TABLE)
    assert r"d\_ff 33" in latex
    assert r"4.1 $\pm$ 0.1" in latex
    assert r"\textasciitilde{}\textasciicircum{}\textbackslash{}" in latex


def test_a_spreadsheet_does_not_execute_cells_of_csv() -> None:
    formulas = ["=1+1", "@x", "-x", "--1", "-1+1"]
    plain = ["-1.5", "-8.5e-05", "+2", "-inf", "-", "", "a,b"]
    [row] = csv.reader(io.StringIO(to_csv([formulas + plain])))
    assert row == [f"'{cell}" for cell in formulas] + plain


def test_html_escapes_cells() -> None:
    page = Page(to_html(TABLE))
    assert HOSTILE in page.text
    assert "b" not in page.tags
