"""Write a sweep's report: a table like Table 3, with our results next to the paper's.

A report's folder contains:

    report/
        table.md  table.tex    scores and comparisons with the first row, as formatted tables
        table.csv              the scores, for a spreadsheet
        comparisons.csv        the unrounded differences from the first row, with their intervals
        runs.csv               the unrounded scores of every run and the commands to reproduce them
        tuning.csv             the perplexity of every trial of a tuned sweep
        index.html             a page with the tables, figures, and notes
        curves.svg             perplexity on the development set by step
        ratios.svg             each row's difference in log perplexity from the first row
"""

import html
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformer_jax.console import escape_control_characters, shell_command
from transformer_jax.errors import storage_errors
from transformer_jax.files import check_no_links, write_bytes
from transformer_jax.reports import tables
from transformer_jax.reports.figures import CURVES_CAPTION, RATIOS_CAPTION, draw_curves, draw_ratios
from transformer_jax.reports.footnotes import (
    STATISTICS,
    documentation_link,
    list_footnotes,
    to_markdown_list,
)
from transformer_jax.reports.results import PaperScore, Results, RowResult
from transformer_jax.reports.seed_statistics import Interval, format_mean, format_p, format_score
from transformer_jax.reports.tables import MISSING, Link, Table
from transformer_jax.runs.metrics_file import is_number
from transformer_jax.sweeps.status import RunStatus

CSS = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:84rem;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:1rem 0}"
    "caption,figcaption{text-align:left;max-width:50rem;padding:.3rem 0;color:#555}"
    "th,td{padding:.2rem .5rem;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}"
    "td{white-space:nowrap}.wide:first-of-type td:nth-child(2),td:last-child{white-space:normal}"
    "th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}.wide{overflow-x:auto}"
    "figure{margin:1rem 0}svg{max-width:100%;height:auto}"
)
Column = Callable[[Results, RowResult], str]


def write_report(results: Results) -> Path:
    """Write all report files and return the report's folder.

    Raises:
        StorageError: the folder cannot be written, or it is or contains a link.
    """
    folder = results.sweep.path / "report"
    if folder.parent.exists():
        check_no_links(folder.parent, lambda name: name == folder.name)
    scores, comparisons = make_table(results, SCORES), make_table(results, COMPARISONS)
    figures = {"ratios.svg": draw_ratios(results), "curves.svg": draw_curves(results)}
    files = {
        "table.md": _make_markdown(results, scores, comparisons),
        "table.tex": f"{tables.to_latex(scores)}\n{tables.to_latex(comparisons)}",
        "table.csv": tables.to_csv(scores),
        "comparisons.csv": tables.to_csv(list_comparisons(results)),
        "runs.csv": tables.to_csv(make_run_table(results)),
        "index.html": _make_page(results, scores, comparisons, list(figures.values())),
        **figures,
        **({"tuning.csv": tables.to_csv(make_trial_table(results))} if results.trials else {}),
    }
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            # A path can contain bytes that are not valid UTF-8, and names from files can contain
            # control characters.
            text = escape_control_characters(content)
            write_bytes(folder / name, text.encode(errors="replace"), durable=False)
    return folder


def _format(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _format_interval(interval: Interval | None, spec: str) -> str:
    """Format an interval, keeping the minus sign of a negative bound that rounds to zero."""
    return f"[{interval.low:{spec}}, {interval.high:{spec}}]" if interval else MISSING


def _format_score(row: RowResult, name: str, digits: int) -> str:
    """Return the mean and standard deviation of a score."""
    values = row.scores.get(name)
    return format_mean(values.values(), digits) if values else MISSING


def _format_difference(results: Results, row: RowResult, score: PaperScore, spec: str) -> str:
    """Return a row's difference from the first row, with its confidence interval."""
    comparison = results.compare(row.name, score)
    if comparison.difference is None:
        return MISSING
    interval = _format_interval(comparison.interval, spec) if comparison.interval else ""
    return f"{comparison.difference:{spec}} {interval}".strip()


def _format_test_differences(results: Results, row: RowResult) -> str:
    by_seed = results.test_differences.get(row.name, {})
    comparisons = (by_seed.get(seed) for seed in results.sweep.seeds)
    cells = [f"{x.bleu:+z.2f} ({format_p(x.p)})" if x else MISSING for x in comparisons]
    return ", ".join(cells) if by_seed else MISSING


def _format_choice(results: Results, row: RowResult) -> str:
    tuning = results.sweep.tuning
    return str(tuning.chosen.get(row.name, MISSING)) if tuning else MISSING


# The heading of each column, and the function that formats the column's cells.
SCORES: dict[str, Column] = {
    "row": lambda _, row: row.name,
    "change": lambda _, row: row.change or "base",
    "tuned": lambda r, row: _format_choice(r, row),
    "parameters": lambda _, row: f"{row.parameters:,}",
    "FLOPs": lambda _, row: _format(row.flops and row.flops[0], ".1e"),
    "time x peak": lambda _, row: _format(row.flops and row.flops[1], ".1e"),
    "seeds": lambda _, row: str(len(row.scores.get("perplexity", ()))),
    "dev perplexity": lambda _, row: _format_score(row, "perplexity", 2),
    "paper": lambda _, row: _format(row.paper.perplexity, ".2f"),
    "dev BLEU": lambda _, row: _format_score(row, "bleu", 1),
    "paper BLEU": lambda _, row: _format(row.paper.bleu, ".1f"),
    "test BLEU": lambda _, row: _format_score(row, "test_bleu", 1),
    "compound-split": lambda _, row: _format_score(row, "compound_bleu", 1),
    "test task": lambda _, row: _format_score(row, "test_task", 1),
}
COMPARISONS: dict[str, Column] = {
    "row": lambda _, row: row.name,
    "ln perplexity to base": lambda r, row: _format_difference(r, row, "perplexity", "+.3f"),
    "Welch": lambda r, row: _format_interval(r.compare(row.name, "perplexity").welch, "+.3f"),
    "paper": lambda r, row: _format(r.paper_difference(row.name, "perplexity"), "+z.3f"),
    "verdict": lambda r, row: r.verdict(row.name, "perplexity") or MISSING,
    "dev BLEU to base": lambda r, row: _format_difference(r, row, "bleu", "+.1f"),
    "Welch, BLEU": lambda r, row: _format_interval(r.compare(row.name, "bleu").welch, "+.1f"),
    "paper BLEU": lambda r, row: _format(r.paper_difference(row.name, "bleu"), "+z.1f"),
    "verdict, BLEU": lambda r, row: r.verdict(row.name, "bleu") or MISSING,
    "test BLEU to base by seed (p)": _format_test_differences,
}
# The columns that `transformer-jax report` prints. The full tables are too wide for a terminal.
SUMMARY: dict[str, Column] = {
    **{heading: SCORES[heading] for heading in ("row", "change", "dev perplexity")},
    **{heading: COMPARISONS[heading] for heading in ("ln perplexity to base", "verdict")},
}


def make_table(results: Results, columns: Mapping[str, Column]) -> list[list[str]]:
    """Return a table whose first row contains the headings, without empty optional columns."""
    table = [
        [heading, *(format_cell(results, row) for row in results.rows.values())]
        for heading, format_cell in columns.items()
    ]
    optional = ("paper", "verdict", "test", "compound-split", "tuned")
    shown = [x for x in table if not x[0].startswith(optional) or set(x[1:]) != {MISSING}]
    return [list(row) for row in zip(*shown, strict=True)]


def list_comparisons(results: Results) -> Table:
    """Return the unrounded differences from the first row, with one line per row and score."""
    headings = ["row", "score", "difference", "low", "high", "p", "welch_low", "welch_high"]
    table = [[*headings, "paper", "verdict"]]
    missing = (None, None)
    for score, analysis in results.analyses.items():
        for name, x in analysis.comparisons.items():
            interval, welch = x.interval or missing, x.welch or missing
            paper, verdict = results.paper_difference(name, score), results.verdict(name, score)
            values = [x.difference, *interval, x.p, *welch, paper, verdict]
            label = "ln perplexity" if score == "perplexity" else "BLEU"
            table.append([name, label, *("" if value is None else str(value) for value in values)])
    return table


def make_run_table(results: Results, digits: int | None = None) -> list[list[str]]:
    """Return a table of the runs, with headings and scores rounded to `digits` decimal places."""
    dev_scores, test_scores = ("perplexity", "bleu"), ("perplexity", "bleu", "chrf")
    headings = ["run", "status", "step", *(f"dev_{name}" for name in dev_scores)]
    table = [[*headings, *(f"test_{name}" for name in test_scores), "signature", "command"]]
    for status in results.statuses:
        dev, test = (status.scores.get(split, {}) for split in ("dev", "test"))
        values = [dev.get(x) for x in dev_scores] + [test.get(x) for x in test_scores]
        numbers = [x if is_number(x) else None for x in values]
        if digits is None:
            scores = ["" if x is None else str(x) for x in numbers]
        else:
            scores = ["" if x is None else format_score(x, digits) for x in numbers]
        command = shell_command("evaluate", status.run.path)
        signature = test.get("bleu_signature", "")
        row = [status.run.name, status.status, status.step, *scores, signature, command]
        table.append(list(map(str, row)))
    return table


def make_trial_table(results: Results) -> Table:
    """Return a table of the trials that chose a value for each row, with one line per trial."""
    if (tuning := results.sweep.tuning) is None:
        return []
    table = [["row", tuning.field, "seed", "status", "dev_perplexity", "chosen"]]
    for trial in results.trials:
        value = tuning.value_of(trial.run.config)
        score = trial.scores.get("dev", {}).get("perplexity", "")
        is_chosen = tuning.chosen.get(trial.run.row) == value
        row = [trial.run.row, value, trial.run.seed, trial.status, score, is_chosen]
        table.append(list(map(str, row)))
    return table


def _make_markdown(results: Results, scores: Table, comparisons: Table) -> str:
    parts = [
        tables.to_markdown(scores),
        tables.to_markdown(comparisons),
        f"![{RATIOS_CAPTION}](ratios.svg)",
        f"![{CURVES_CAPTION}](curves.svg)",
        to_markdown_list(list_footnotes(results), results.sweep.path / "report"),
    ]
    return "\n\n".join(parts) + "\n"


def _make_page(results: Results, scores: Table, comparisons: Table, figures: Sequence[str]) -> str:
    """Return the report as a self-contained HTML page with links to the runs."""

    def link(status: RunStatus, tooltip: str) -> Link:
        path = os.path.relpath(status.run.path, results.sweep.path / "report")
        return Link(Path(path).as_posix(), tooltip)

    row_links = [
        link(row.statuses[0], "; ".join(f"{k}: {v}" for k, v in row.missing.items()))
        for row in results.rows.values()
    ]
    run_links = [link(status, status.note) for status in results.statuses]
    # Omit the last two columns, the signature and the command, which are in runs.csv.
    runs = [row[:-2] for row in make_run_table(results, digits=2)]
    title = html.escape(results.sweep.path.resolve().name)
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in list_footnotes(results))
    if path := documentation_link(results.sweep.path / "report"):
        notes = notes.replace(STATISTICS, f'<a href="{html.escape(path)}">{STATISTICS}</a>')
    captions = (RATIOS_CAPTION, CURVES_CAPTION)
    drawings = "\n".join(
        f"<figure>{svg[svg.index('<svg') :]}<figcaption>{caption}</figcaption></figure>"
        for svg, caption in zip(figures, captions, strict=True)
    )
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f"<style>{CSS}</style>\n<h1>{title}</h1>\n"
        f"{tables.to_html(scores, row_links, 'Scores: mean ± standard deviation over seeds')}\n"
        f"{tables.to_html(comparisons, row_links, 'Differences from the first row')}\n"
        f"{drawings}\n<h2>Notes</h2>\n<ul>\n{notes}\n</ul>\n<h2>Runs</h2>\n"
        f"{tables.to_html(runs, run_links, 'Unrounded scores are in runs.csv.')}\n</html>\n"
    )
