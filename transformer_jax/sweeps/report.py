"""A sweep as the paper's Table 3: our figures beside the paper's, with their spread.

report/
    table.md  table.tex  table.csv   the table, for reading, for a paper, for a spreadsheet
    runs.csv                         every run's own figures, unrounded, with signature and command
    index.html                       the tables, the curves and what they mean, in one file
    curves.svg                       perplexity of the development set by step
    ratios.svg                       each row's perplexity over base's: ours and the paper's
"""

import csv
import html
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from transformer_jax.console import shell_command
from transformer_jax.errors import StorageError
from transformer_jax.sweeps.figures import curves, ratios
from transformer_jax.sweeps.results import CONFIDENCE, Results, RowResult, SeedStatistics
from transformer_jax.sweeps.status import RunStatus

# Heading, and the cell of a row.
Column = tuple[str, Callable[[Results, RowResult], str]]
NONE = "-"
LATEX = {
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
}
MARKDOWN = str.maketrans({c: f"\\{c}" for c in r"\|*_`<>[]"})


def write_report(results: Results) -> Path:
    """Write all of the report; return its folder.

    Raises:
        StorageError: it cannot be written.
    """
    folder = results.sweep.path / "report"
    figures = {"ratios.svg": ratios(results), "curves.svg": curves(results)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {
            "table.md": to_markdown(results),
            "table.tex": to_latex(results),
            "table.csv": to_csv(cells(results)),
            "runs.csv": to_csv(runs(results)),
            "index.html": to_html(results, list(figures.values())),
            **figures,
        }.items():
            (folder / name).write_text(content, "utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _spread(spread: SeedStatistics | None, digits: int) -> str:
    if spread is None:
        return NONE
    if spread.deviation is None:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def _p(row: RowResult, seeds: Sequence[int]) -> str:
    return " ".join(_number(row.p.get(seed), ".3f") for seed in seeds) if row.p else NONE


def _seeds(row: RowResult) -> int:
    return len(row.scores["perplexity"].values) if "perplexity" in row.scores else 0


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _sign(results: Results, row: RowResult) -> str:
    agrees = results.agrees(row.name, "perplexity")
    if agrees is None:
        return NONE
    proof = "" if results.is_significant(row.name, "perplexity") else ", not significant"
    return ("yes" if agrees else "no") + proof


def _paper_difference(results: Results, row: RowResult, score: str) -> str:
    ours, base = getattr(row.paper, score), getattr(results.base.paper, score)
    return NONE if ours is None or base is None else f"{ours - base:+.2f}"


COLUMNS: tuple[Column, ...] = (
    ("row", lambda _, row: row.name),
    ("change", lambda _, row: row.change or "base"),
    ("parameters", lambda _, row: f"{row.parameters:,}"),
    ("FLOPs", lambda _, row: _number(row.flops and row.flops[0], ".1e")),
    ("time x peak", lambda _, row: _number(row.flops and row.flops[1], ".1e")),
    ("seeds", lambda _, row: str(_seeds(row))),
    ("dev perplexity", lambda _, row: _spread(row.scores.get("perplexity"), 2)),
    ("to base", lambda r, row: _number(r.difference(row.name, "perplexity"), "+.2f")),
    ("paper", lambda _, row: _number(row.paper.perplexity, ".2f")),
    ("paper to base", lambda r, row: _paper_difference(r, row, "perplexity")),
    ("same sign", _sign),
    ("dev BLEU", lambda _, row: _spread(row.scores.get("bleu"), 1)),
    ("paper BLEU", lambda _, row: _number(row.paper.bleu, ".1f")),
    ("test BLEU", lambda _, row: _spread(row.scores.get("test_bleu"), 1)),
    ("compound-split", lambda _, row: _spread(row.scores.get("compound_bleu"), 1)),
    ("p", lambda r, row: _p(row, r.sweep.seeds)),
)


# What may have nothing to say, of rows that are not the paper's or of BLEU over characters.
OPTIONAL = {"paper", "paper to base", "same sign", "paper BLEU", "compound-split"}


def cells(results: Results) -> list[list[str]]:
    """Return the table, headings first."""
    columns = [
        [name, *(cell(results, row) for row in results.rows.values())] for name, cell in COLUMNS
    ]
    told = [column for column in columns if column[0] not in OPTIONAL or {*column[1:]} != {NONE}]
    return [list(row) for row in zip(*told, strict=True)]


def runs(results: Results) -> list[list[str]]:
    """Return every run's own figures, headings first."""
    head = "run state step dev_perplexity dev_bleu test_perplexity test_bleu test_chrf signature"
    return [
        [*head.split(), "command"],
        *(_run_cells(state) for row in results.rows.values() for state in row.states),
    ]


def _run_cells(state: RunStatus) -> list[str]:
    dev, test = (state.scores.get(split, {}) for split in ("dev", "test"))
    figures = [
        *(dev.get(key, "") for key in ("perplexity", "bleu")),
        *(test.get(key, "") for key in ("perplexity", "bleu", "chrf", "bleu_signature")),
    ]
    again = shell_command("evaluate", state.run.path)
    return [state.run.name, state.status, str(state.step), *map(str, figures), again]


def footnotes(results: Results) -> list[str]:
    """Return what a reader must know to read the table, and what is missing in it."""
    least = {
        score: results.minimum_detectable_difference(score) for score in ("perplexity", "test_bleu")
    }
    told = [
        "Perplexity is per piece, without label smoothing; ± is the standard deviation over "
        "random seeds.",
        "The paper's figures are of newstest2013; ours are of the sets that the configs name. "
        "Differences from base can be compared, the figures themselves cannot.",
        "FLOPs: the arithmetic of one training, counted over its real tokens. time x peak: by the "
        "paper's own method, training time x what the devices can do in a second; it has 3.3e18 "
        "for base and 2.3e19 for big (Table 2).",
    ]
    if results.signature:
        told.insert(
            1,
            "p: for each seed, how often a difference from base in test BLEU like this comes by "
            f"the choice of sentences alone (sacreBLEU's paired bootstrap, {results.signature}).",
        )
    if any("compound_bleu" in row.scores for row in results.rows.values()):
        told.append(
            "Compound-split BLEU parts words at hyphens before it counts, as the paper's script "
            "does: each half of a compound counts as a word, and scores come out higher than "
            "sacreBLEU's."
        )
    if least["perplexity"] is None:
        told.append("Every row has one seed: a difference between such rows proves nothing.")
    else:
        bleu = "" if least["test_bleu"] is None else f" and {least['test_bleu']:.2f} BLEU"
        told.append(
            f"The smallest difference that seeds alone do not explain ({CONFIDENCE:.0%}, standard "
            f"deviation pooled over rows): {least['perplexity']:.3f} perplexity{bleu}."
        )
    singles = [name for name, row in results.rows.items() if _seeds(row) == 1]
    if singles and least["perplexity"] is not None:
        told.append(f"Of one seed, which proves nothing by itself: {', '.join(singles)}.")
    if any(results.agrees(name, "perplexity") is not None for name in results.rows):
        told.append(_agreement(results))
    if own := [name for name, row in results.rows.items() if row.has_own_text]:
        told.append(
            f"Of other text, or another vocabulary, than {results.base.name}: {', '.join(own)}. "
            f"Perplexities per piece cannot be compared then."
        )
    searches = {
        json.dumps([scores.get("average_checkpoints"), scores.get("decode")])
        for row in results.rows.values()
        for state in row.states
        for scores in state.scores.values()
    }
    if len(searches) > 1:
        told.append("Not all runs were scored by the same search, or by as many checkpoints.")
    told += [
        f"{state.run.name} {state.note}."
        for row in results.rows.values()
        for state in row.states
        if state.status == "done" and state.note
    ]
    told += [f"Missing: {why}" for row in results.rows.values() for why in row.missing]
    told.append(f"Made by: {results.command}")
    return told


def _agreement(results: Results) -> str:
    """Count the rows that are better or worse than base as in the paper."""
    counted = {True: [0, 0], False: [0, 0]}
    for name in results.rows:
        agrees = results.agrees(name, "perplexity")
        if agrees is not None:
            of = counted[results.is_significant(name, "perplexity")]
            of[0] += agrees
            of[1] += 1
    return (
        f"The sign of the difference in perplexity is the paper's in {counted[True][0]} of "
        f"{counted[True][1]} rows whose difference is significant, and in {counted[False][0]} of "
        f"{counted[False][1]} whose difference is not."
    )


def to_markdown(results: Results) -> str:
    """Return the table and the remarks as Markdown."""
    head, *rows = [[cell.translate(MARKDOWN) for cell in row] for row in cells(results)]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    told = "\n".join(f"- {remark.translate(MARKDOWN)}" for remark in footnotes(results))
    return f"{table}\n\n{told}\n"


def to_latex(results: Results) -> str:
    """Return the table for LaTeX, with booktabs."""
    head, *rows = [
        " & ".join("".join(LATEX.get(c, c) for c in cell) for cell in row) + r" \\"
        for row in cells(results)
    ]
    columns = "ll" + "r" * (len(cells(results)[0]) - 2)
    body = "\n".join(rows)
    return (
        "% \\usepackage{booktabs}\n"
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n{body}\n\\bottomrule\n"
        "\\end{tabular}\n"
    )


def to_csv(table: list[list[str]]) -> str:
    """Return a table as CSV; what a spreadsheet would take for a formula begins with a quote."""
    out = io.StringIO()
    for row in table:
        numbers = [cell.lstrip("+-").replace(".", "", 1).isdecimal() for cell in row]
        csv.writer(out, lineterminator="\n").writerow(
            cell if is_number or cell in ("", NONE) or cell[0] not in "=+-@\t\r" else f"'{cell}"
            for cell, is_number in zip(row, numbers, strict=True)
        )
    return out.getvalue()


def to_html(results: Results, figures: Sequence[str]) -> str:
    """Return all of the report as one page that needs nothing else; rows lead to their runs."""
    rows = zip(results.rows.values(), cells(results)[1:], strict=True)
    states = [state for row in results.rows.values() for state in row.states]
    each = zip(states, runs(results)[1:], strict=True)
    table = _table(
        cells(results)[0], ((row.states[0], row.missing, texts) for row, texts in rows), results
    )
    single = _table(
        runs(results)[0],
        ((state, [state.note] if state.note else [], texts) for state, texts in each),
        results,
    )
    told = "\n".join(f"<li>{html.escape(text)}</li>" for text in footnotes(results))
    title = html.escape(results.sweep.path.resolve().name)
    drawn = "\n".join(svg[svg.index("<svg") :] for svg in figures)
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n{table}\n<ul>\n{told}\n</ul>\n{drawn}\n"
        f"<h2>Runs</h2>\n{single}\n</html>\n"
    )


def _table(
    head: Sequence[str],
    rows: Iterable[tuple[RunStatus, Sequence[str], Sequence[str]]],
    results: Results,
) -> str:
    """Return a table of which each row's first cell leads to a run, and says what is missing."""
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    for state, missing, (first, *others) in rows:
        place = os.path.relpath(state.run.path, results.sweep.path / "report")
        link = html.escape(quote(Path(place).as_posix()), quote=True)
        why = html.escape("; ".join(missing), quote=True)
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        lines.append(f'<td><a href="{link}" title="{why}">{html.escape(first)}</a></td>{cells}')
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class=wide><table>\n{body}\n</table></div>"


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}.wide{overflow-x:auto}"
    "svg{max-width:100%;height:auto}"
)
