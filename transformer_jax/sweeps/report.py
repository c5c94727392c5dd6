"""Write the report of a sweep: its results next to the paper's, as in Table 3.

report/
    table.md  table.tex  table.csv   the table for reading, for a paper, and for a spreadsheet
    runs.csv                         the unrounded scores of every run, and how to reproduce them
    index.html                       a page with the tables, figures, and footnotes
    curves.svg                       perplexity on the development set by step
    ratios.svg                       each row's perplexity relative to the first row's
"""

import html
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from transformer_jax.console import shell_command
from transformer_jax.errors import StorageError
from transformer_jax.sweeps import tables
from transformer_jax.sweeps.figures import draw_curves, draw_ratios
from transformer_jax.sweeps.results import Results, RowResult
from transformer_jax.sweeps.seed_statistics import CONFIDENCE
from transformer_jax.sweeps.status import RunStatus
from transformer_jax.sweeps.tables import MISSING, Link

CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}.wide{overflow-x:auto}"
    "svg{max-width:100%;height:auto}"
)


def write_report(results: Results) -> Path:
    """Write all files of the report; return their folder. Raise StorageError if that fails."""
    folder = results.sweep.path / "report"
    table, runs = make_table(results), make_run_table(results)
    figures = {"ratios.svg": draw_ratios(results), "curves.svg": draw_curves(results)}
    notes = "\n".join(f"- {tables.escape_markdown(note)}" for note in footnotes(results))
    files = {
        "table.md": f"{tables.to_markdown(table)}\n\n{notes}\n",
        "table.tex": tables.to_latex(table),
        "table.csv": tables.to_csv(table),
        "runs.csv": tables.to_csv(runs),
        "index.html": make_page(results, table, runs, list(figures.values())),
        **figures,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content, "utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _format(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _format_score(row: RowResult, score: str, digits: int) -> str:
    return row.scores[score].format(digits) if score in row.scores else MISSING


def _format_p(results: Results, row: RowResult) -> str:
    seeds = results.sweep.seeds
    return " ".join(_format(row.p.get(seed), ".3f") for seed in seeds) if row.p else MISSING


def _format_sign(results: Results, row: RowResult) -> str:
    is_same = results.has_paper_sign(row.name, "perplexity")
    if is_same is None:
        return MISSING
    suffix = "" if results.is_significant(row.name, "perplexity") else ", not significant"
    return ("yes" if is_same else "no") + suffix


# The heading of each column, and the function that returns a row's cell.
COLUMNS: dict[str, Callable[[Results, RowResult], str]] = {
    "row": lambda _, row: row.name,
    "change": lambda _, row: row.change or "base",
    "parameters": lambda _, row: f"{row.parameters:,}",
    "FLOPs": lambda _, row: _format(row.flops and row.flops[0], ".1e"),
    "time x peak": lambda _, row: _format(row.flops and row.flops[1], ".1e"),
    "seeds": lambda _, row: str(row.num_seeds),
    "dev perplexity": lambda _, row: _format_score(row, "perplexity", 2),
    "to base": lambda r, row: _format(r.difference(row.name, "perplexity"), "+.2f"),
    "paper": lambda _, row: _format(row.paper.perplexity, ".2f"),
    "paper to base": lambda r, row: _format(r.paper_difference(row.name, "perplexity"), "+.2f"),
    "same sign": _format_sign,
    "dev BLEU": lambda _, row: _format_score(row, "bleu", 1),
    "paper BLEU": lambda _, row: _format(row.paper.bleu, ".1f"),
    "test BLEU": lambda _, row: _format_score(row, "test_bleu", 1),
    "compound-split": lambda _, row: _format_score(row, "compound_bleu", 1),
    "p": _format_p,
}
# Columns that are left out if they are empty, as for rows that are not in the paper or for BLEU
# over characters.
OPTIONAL_COLUMNS = {"paper", "paper to base", "same sign", "paper BLEU", "compound-split"}


def make_table(results: Results) -> list[list[str]]:
    """Return the table of rows, headings first."""
    columns = [
        [heading, *(format_cell(results, row) for row in results.rows.values())]
        for heading, format_cell in COLUMNS.items()
    ]
    shown = [x for x in columns if x[0] not in OPTIONAL_COLUMNS or set(x[1:]) != {MISSING}]
    return [list(row) for row in zip(*shown, strict=True)]


def make_run_table(results: Results) -> list[list[str]]:
    """Return the table of runs with unrounded scores, headings first."""
    dev_scores = ("perplexity", "bleu")
    test_scores = ("perplexity", "bleu", "chrf", "bleu_signature")
    headings = ["run", "status", "step", "dev_perplexity", "dev_bleu"]
    headings += ["test_perplexity", "test_bleu", "test_chrf", "signature", "command"]
    table = [headings]
    for status in _all_statuses(results):
        dev, test = (status.scores.get(split, {}) for split in ("dev", "test"))
        scores = [dev.get(x, "") for x in dev_scores] + [test.get(x, "") for x in test_scores]
        command = shell_command("evaluate", status.run.path)
        row = [status.run.name, status.status, status.step, *scores, command]
        table.append(list(map(str, row)))
    return table


def _all_statuses(results: Results) -> list[RunStatus]:
    return [status for row in results.rows.values() for status in row.statuses]


def footnotes(results: Results) -> list[str]:
    """Return sentences that explain the table, qualify its results, and list what is missing."""
    notes = _explain_columns(results) + _explain_differences(results) + _list_caveats(results)
    missing = [f"Missing: {reason}" for row in results.rows.values() for reason in row.missing]
    return [*notes, *missing, f"Command: {results.command}"]


def _explain_columns(results: Results) -> list[str]:
    p = (
        f"p: for each seed, the p-value of the difference in test BLEU from {results.base.name}, "
        f"by sacreBLEU's paired bootstrap over sentences ({results.signature})."
    )
    notes = [
        "Perplexity is per token, without label smoothing. ± is the standard deviation over "
        "random seeds.",
        *([p] if results.signature else []),
        "The paper's scores are on newstest2013, and ours are on the sets that the configs name. "
        "Compare the differences from base with the paper's, not the scores themselves.",
        "FLOPs: the arithmetic of one training, counted over its real tokens. time x peak: the "
        "paper's estimate, training time multiplied by the peak FLOP/s of the devices; the paper "
        "reports 3.3e18 for base and 2.3e19 for big (Table 2).",
    ]
    if any("compound_bleu" in row.scores for row in results.rows.values()):
        notes.append(
            "compound-split: test BLEU with words split at hyphens, as the paper's script does. "
            "Each half of a compound counts as a word, so scores are higher than sacreBLEU's."
        )
    return notes


def _explain_differences(results: Results) -> list[str]:
    """Explain which differences between rows exceed the variation across seeds."""
    perplexity, bleu = map(results.minimum_detectable_difference, ("perplexity", "test_bleu"))
    singles = [row.name for row in results.rows.values() if row.num_seeds == 1]
    notes = []
    if perplexity is None:
        notes.append("Every row has only one seed, so a difference between rows proves nothing.")
    else:
        and_bleu = "" if bleu is None else f" and {bleu:.2f} BLEU"
        notes.append(
            f"The smallest difference that seeds alone do not explain ({CONFIDENCE:.0%} "
            f"confidence, standard deviation pooled over rows): {perplexity:.3f} perplexity"
            f"{and_bleu}."
        )
        if singles:
            notes.append(f"Rows with only one seed prove nothing alone: {', '.join(singles)}.")
    signs: dict[bool, list[bool]] = {True: [], False: []}
    for name in results.rows:
        if (is_same := results.has_paper_sign(name, "perplexity")) is not None:
            signs[results.is_significant(name, "perplexity")].append(is_same)
    if signs[True] or signs[False]:
        notes.append(
            f"The difference in perplexity from base has the paper's sign in {sum(signs[True])} of "
            f"{len(signs[True])} rows with a significant difference, and in {sum(signs[False])} of "
            f"{len(signs[False])} rows without one."
        )
    return notes


def _list_caveats(results: Results) -> list[str]:
    notes = []
    if names := [row.name for row in results.rows.values() if row.has_own_text]:
        notes.append(
            f"Rows whose text or vocabulary differs from that of {results.base.name}: "
            f"{', '.join(names)}. Their perplexities per token cannot be compared."
        )
    statuses = _all_statuses(results)
    searches = {
        json.dumps([scores.get("average_checkpoints"), scores.get("decode")])
        for status in statuses
        for scores in status.scores.values()
    }
    if len(searches) > 1:
        notes.append(
            "The runs were scored with different search options or different numbers of averaged "
            "checkpoints."
        )
    return notes + [f"{s.run.name} {s.note}." for s in statuses if s.status == "done" and s.note]


def make_page(
    results: Results, table: tables.Table, runs: tables.Table, figures: Sequence[str]
) -> str:
    """Return the report as one HTML page without external files.

    Rows link to their first runs. `figures` contains SVG files.
    """

    def link(status: RunStatus, tooltip: str) -> Link:
        path = os.path.relpath(status.run.path, results.sweep.path / "report")
        return Link(Path(path).as_posix(), tooltip)

    row_links = [link(row.statuses[0], "; ".join(row.missing)) for row in results.rows.values()]
    run_links = [link(status, status.note) for status in _all_statuses(results)]
    title = html.escape(results.sweep.path.resolve().name)
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in footnotes(results))
    drawings = "\n".join(svg[svg.index("<svg") :] for svg in figures)
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f"<style>{CSS}</style>\n<h1>{title}</h1>\n{tables.to_html(table, row_links)}\n"
        f"<ul>\n{notes}\n</ul>\n{drawings}\n<h2>Runs</h2>\n{tables.to_html(runs, run_links)}\n"
        f"</html>\n"
    )
