"""Format tables as Markdown, LaTeX, CSV, and HTML.

A table is a sequence of rows of text cells. The first row contains the headings.
"""

import csv
import html
import io
import re
from collections.abc import Sequence

Table = Sequence[Sequence[str]]
MISSING = "-"
# A number with a sign, as Python's format specification `+` prints it.
NUMBER = re.compile(r"[+-]\d*\.?\d+(e[+-]\d+)?|-inf")
MARKDOWN_ESCAPES = str.maketrans({c: f"\\{c}" for c in r"\|*_`<>[]"})
LATEX_ESCAPES = str.maketrans(
    {
        **{c: rf"\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
)


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown renders it literally."""
    return text.translate(MARKDOWN_ESCAPES)


def to_markdown(table: Table, *, align: bool = False) -> str:
    """Return a Markdown table. `align` pads cells and right-aligns every column but the first."""
    head, *body = [[escape_markdown(cell) for cell in row] for row in table]
    rule = ["---"] * len(head)
    if align:
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        head, *body = [
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, *body)
        ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def to_latex(table: Table) -> str:
    """Return a LaTeX table for the booktabs package, with the first two columns left-aligned."""
    head, *body = [
        " & ".join(cell.translate(LATEX_ESCAPES) for cell in row) + r" \\" for row in table
    ]
    columns = "ll" + "r" * (len(table[0]) - 2)
    begin = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head]
    return "\n".join([*begin, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(table: Table) -> str:
    """Return CSV, with an apostrophe before text that a spreadsheet would evaluate as a formula."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_escape_formula, row) for row in table)
    return out.getvalue()


def _escape_formula(cell: str) -> str:
    is_formula = cell.startswith(("=", "+", "-", "@", "\t", "\r")) and cell != MISSING
    return f"'{cell}" if is_formula and not NUMBER.fullmatch(cell) else cell


def to_html(table: Table) -> str:
    """Return an HTML table."""
    head, *body = ([html.escape(cell) for cell in row] for row in table)
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    # Avoid a line break between a number and the parenthesis that follows it.
    lines += ["".join(f"<td>{cell.replace(' (', '&nbsp;(')}</td>" for cell in row) for row in body]
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class=wide><table>\n{rows}\n</table></div>"
