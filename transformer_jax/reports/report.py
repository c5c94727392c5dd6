"""Write a sweep's report: a table like Table 3, with our results next to the paper's.

A report's folder contains:

    report/
        table.md  table.tex    scores and comparisons with the first row, as formatted tables
        table.csv              the scores, for a spreadsheet
        comparisons.csv        the unrounded differences from the first row, with their intervals
        runs.csv               the unrounded scores of every run and the commands to reproduce them
        tuning.csv             the perplexity of every trial of a tuned sweep
        factors.csv            the effects of fields, if the rows are all of their combinations
        index.html             a page with the answers, the figures, the tables, and the notes
        curves.svg  .pdf       perplexity on the development set by step
        ratios.svg  .pdf       each row's difference in log perplexity from the first row
"""

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from transformer_jax.console import escape_control_characters, shell_command
from transformer_jax.errors import storage_errors
from transformer_jax.evaluation.scores import MAX_ORDER
from transformer_jax.files import check_no_links, write_bytes
from transformer_jax.reports import tables
from transformer_jax.reports.answers import answer, answer_factors, question, summarize
from transformer_jax.reports.factors import Contrast
from transformer_jax.reports.figures import (
    CURVES_CAPTION,
    describe_ratios,
    draw_curves,
    draw_ratios,
)
from transformer_jax.reports.footnotes import list_footnotes, to_markdown_list
from transformer_jax.reports.results import (
    BleuDifference,
    PaperScore,
    Results,
    RowResult,
    ScoredSplit,
)
from transformer_jax.reports.seed_statistics import Interval, format_mean, format_p, format_score
from transformer_jax.reports.tables import MISSING, Table
from transformer_jax.runs.metrics_file import is_number
from transformer_jax.sweeps.plan import find_tuned

Column = Callable[[Results, RowResult], str]
SPECS: dict[PaperScore, str] = {"perplexity": "+.3f", "bleu": "+.2f"}
SPLIT_NAMES: dict[ScoredSplit, str] = {"dev": "development", "test": "test"}
ALTERNATIVES = {
    "ratios": "Difference in log perplexity of each row from the first row",
    "curves": "Perplexity of each row on the development set by step",
}
RUNS = "Runs (their unrounded scores are in runs.csv)"


def write_report(results: Results) -> Path:
    """Write all report files and return the report's folder."""
    folder = results.sweep.path / "report"
    if folder.parent.exists():
        check_no_links(folder.parent, lambda name: name == folder.name)
    scores = make_table(results, SCORES)
    # The set that the answers use comes first.
    tabled = {"Scores: mean ± standard deviation over seeds": scores} | {
        f"Differences from {results.base.name} on the {SPLIT_NAMES[split]} set": make_table(
            results, COMPARISONS[split]
        )
        for split in reversed(results.splits)
    }
    effects = {
        (split, score): contrasts
        for split in reversed(results.splits)
        for score in SPECS
        if (contrasts := results.contrasts(score, split))
    }
    for (split, score), contrasts in effects.items():
        label = "ln perplexity" if score == "perplexity" else "BLEU"
        title = f"Effects of fields on {label} on the {SPLIT_NAMES[split]} set"
        tabled[title] = _make_effect_table(contrasts, SPECS[score])
    # The last columns, from the brevity penalty to the command, are only in runs.csv.
    runs = [row[: -MAX_ORDER - 3] for row in make_run_table(results, digits=2)]
    pictures = {"ratios": draw_ratios(results), "curves": draw_curves(results)}
    captions = {"ratios": describe_ratios(results), "curves": CURVES_CAPTION}
    figures = {caption: pictures[name].svg for name, caption in captions.items()}
    files: dict[str, str | bytes] = {
        "table.md": _make_markdown(results, captions, tabled),
        "table.tex": "\n".join(map(tables.to_latex, tabled.values())),
        "table.csv": tables.to_csv(scores),
        "comparisons.csv": tables.to_csv(list_comparisons(results)),
        "runs.csv": tables.to_csv(make_run_table(results)),
        "index.html": _make_page(results, figures, {**tabled, RUNS: runs}),
        **{f"{name}.svg": figures[caption] for name, caption in captions.items()},
        **{f"{name}.pdf": picture.pdf for name, picture in pictures.items()},
    }
    optional = {
        "factors.csv": _list_effects(effects) if effects else None,
        "tuning.csv": make_trial_table(results) if results.trials else None,
    }
    files |= {name: tables.to_csv(table) for name, table in optional.items() if table}
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, str):
                # A path can contain bytes that are not valid UTF-8, and names from files can
                # contain control characters.
                content = escape_control_characters(content).encode(errors="replace")
            write_bytes(folder / name, content, durable=False)
        for name in optional.keys() - files.keys():
            # An earlier report may have had this table.
            (folder / name).unlink(missing_ok=True)
    return folder


def _format(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _format_interval(interval: Interval | None, spec: str) -> str:
    """Format an interval, keeping the minus sign of a negative bound that rounds to zero."""
    return f"[{interval.low:{spec}}, {interval.high:{spec}}]" if interval else MISSING


def _format_score(row: RowResult, name: str, digits: int) -> str:
    values = row.scores.get(name)
    return format_mean(values.values(), digits) if values else MISSING


def _format_difference(
    results: Results, row: RowResult, score: PaperScore, split: ScoredSplit
) -> str:
    comparison, spec = results.compare(row.name, score, split), SPECS[score]
    if comparison.difference is None:
        return MISSING
    if comparison.interval is None and row.name != results.base.name:
        seeds = min(len(x.find(score, split)) for x in (row, results.base))
        count = f"{seeds} seed{'s' if seeds > 1 else ''}"
        return f"{comparison.difference:{spec}} (no interval: {count})"
    interval = _format_interval(comparison.interval, spec) if comparison.interval else ""
    return f"{comparison.difference:{spec}} {interval}".strip()


def _format_welch(results: Results, row: RowResult, score: PaperScore, split: ScoredSplit) -> str:
    return _format_interval(results.compare(row.name, score, split).welch, SPECS[score])


def _format_test_differences(results: Results, row: RowResult) -> str:
    by_seed = results.test_differences.get(row.name, {})
    comparisons = (by_seed.get(seed) for seed in results.sweep.seeds)
    cells = [_format_by_seed(x) if x else MISSING for x in comparisons]
    return ", ".join(cells) if by_seed else MISSING


def _format_by_seed(difference: BleuDifference) -> str:
    p = "" if difference.p is None else f" ({format_p(difference.p)})"
    return f"{difference.bleu:+z.2f}{p}"


# The heading of each column, and the function that formats the column's cells.
SCORES: dict[str, Column] = {
    "row": lambda _, row: row.name,
    "change": lambda r, row: (row.change or r.base.name) + ", other seeds" * row.is_control,
    "tuned": lambda r, row: (
        str(r.sweep.tuning.chosen.get(find_tuned(r.sweep.rows, row.name), MISSING))
        if r.sweep.tuning
        else MISSING
    ),
    "parameters": lambda _, row: f"{row.parameters:,}",
    "FLOPs": lambda _, row: _format(row.flops and row.flops[0], ".1e"),
    "time x peak": lambda _, row: _format(row.flops and row.flops[1], ".1e"),
    "ms per step": lambda _, row: _format(row.step_seconds and 1000 * row.step_seconds, ",.1f"),
    "seeds": lambda _, row: str(len({seed for x in row.scores.values() for seed in x})),
    "dev perplexity": lambda _, row: _format_score(row, "perplexity", 2),
    "paper": lambda _, row: _format(row.paper.perplexity, ".2f"),
    "dev BLEU": lambda _, row: _format_score(row, "bleu", 1),
    "paper BLEU": lambda _, row: _format(row.paper.bleu, ".1f"),
    "test perplexity": lambda _, row: _format_score(row, "test_perplexity", 2),
    "test BLEU": lambda _, row: _format_score(row, "test_bleu", 1),
    "test precision": lambda _, row: _format_score(row, "precision", 1),
    "test brevity": lambda _, row: _format_score(row, "brevity_penalty", 3),
    "compound-split": lambda _, row: _format_score(row, "compound_bleu", 1),
    "test task": lambda _, row: _format_score(row, "test_task", 1),
}


def _list_columns(split: ScoredSplit) -> dict[str, Column]:
    columns: dict[str, Column] = {
        "row": lambda _, row: row.name,
        "ln perplexity minus base": lambda r, row: _format_difference(r, row, "perplexity", split),
        "Welch": lambda r, row: _format_welch(r, row, "perplexity", split),
        "paper": lambda r, row: _format(r.paper_difference(row.name, "perplexity"), "+z.3f"),
        "verdict": lambda r, row: r.verdict(row.name, "perplexity", split) or MISSING,
        f"{split} BLEU minus base": lambda r, row: _format_difference(r, row, "bleu", split),
        "Welch, BLEU": lambda r, row: _format_welch(r, row, "bleu", split),
        "paper BLEU": lambda r, row: _format(r.paper_difference(row.name, "bleu"), "+z.1f"),
        "verdict, BLEU": lambda r, row: r.verdict(row.name, "bleu", split) or MISSING,
    }
    if split == "test":
        columns["test BLEU minus base by seed"] = _format_test_differences
    return columns


COMPARISONS: dict[ScoredSplit, dict[str, Column]] = {
    "dev": _list_columns("dev"),
    "test": _list_columns("test"),
}


def summary_table(results: Results) -> list[list[str]]:
    """Return a table for the terminal, with the scores on the set that the answers use."""
    split = results.splits[-1]
    columns = {heading: SCORES[heading] for heading in ("row", "change", f"{split} perplexity")}
    compared = {x: COMPARISONS[split][x] for x in ("ln perplexity minus base", "verdict")}
    return make_table(results, columns | compared)


def make_table(results: Results, columns: Mapping[str, Column]) -> list[list[str]]:
    """Return a table whose first row contains the headings, without empty optional columns."""
    table = [
        [
            heading.replace(" minus base", f" minus {results.base.name}"),
            *(format_cell(results, row) for row in results.rows.values()),
        ]
        for heading, format_cell in columns.items()
    ]
    optional = ("ms", "Welch", "paper", "verdict", "test", "compound-split", "tuned")
    shown = [x for x in table if not x[0].startswith(optional) or set(x[1:]) != {MISSING}]
    return [list(row) for row in zip(*shown, strict=True)]


def list_comparisons(results: Results) -> Table:
    """Return the unrounded differences from the first row for each row, score, and set.

    The last column names the method of the interval from `low` to `high`.
    """
    headings = ["row", "score", "difference", "low", "high", "p", "welch_low", "welch_high"]
    table = [[*headings, "paper", "verdict", "split", "method"]]
    missing = (None, None)
    for split, analyses in results.analyses.items():
        for score, analysis in analyses.items():
            controls = [name for name, row in results.rows.items() if row.is_control]
            for name in (*analysis.comparisons, *controls):
                x = results.compare(name, score, split)
                interval, welch = x.interval or missing, x.welch or missing
                paper = results.paper_difference(name, score)
                values = [x.difference, *interval, x.p, *welch, paper]
                other = "Welch" if name in controls else "Welch, Bonferroni"
                method = (other if x.p is None else "Dunnett") if x.interval else None
                values += [results.verdict(name, score, split), split, method]
                label = "ln perplexity" if score == "perplexity" else "BLEU"
                cells = ("" if value is None else str(value) for value in values)
                table.append([name, label, *cells])
    return table


def make_run_table(results: Results, digits: int | None = None) -> list[list[str]]:
    """Return a table of the runs, with headings and scores rounded to `digits` decimal places."""
    dev_scores, test_scores = ("perplexity", "bleu"), ("perplexity", "bleu", "chrf")
    format_number = str if digits is None else partial(format_score, digits=digits)
    headings = ["run", "status", "step", *(f"dev_{name}" for name in dev_scores)]
    headings += [f"test_{name}" for name in test_scores]
    headings += ["test_brevity_penalty", *(f"test_precision_{n + 1}" for n in range(MAX_ORDER))]
    table = [[*headings, "signature", "command"]]
    for status in results.statuses:
        dev, test = (status.scores.get(split, {}) for split in ("dev", "test"))
        values = [dev.get(x) for x in dev_scores] + [test.get(x) for x in test_scores]
        stored = test.get("precisions")
        is_valid = isinstance(stored, list) and len(stored) == MAX_ORDER
        precisions = stored if is_valid else [None] * MAX_ORDER
        values += [test.get("brevity_penalty"), *precisions]
        scores = [format_number(x) if is_number(x) else "" for x in values]
        splits = [] if test or not dev else ["--split", "dev"]
        command = shell_command("evaluate", status.run.path, *splits)
        signature = test.get("bleu_signature", "")
        row = [status.run.name, status.status, status.step, *scores, signature, command]
        table.append(list(map(str, row)))
    return table


def _make_effect_table(contrasts: Sequence[Contrast], spec: str) -> list[list[str]]:
    table = [["effect", "kind", "difference", "Welch", "p"]]
    for name, kind, x in ((x.name, x.kind, x.comparison) for x in contrasts):
        interval = _format_interval(x.interval, spec) if x.interval else "(no interval)"
        p = MISSING if x.p is None else format_p(x.p)
        cells = [f"{_format(x.difference, spec)} {interval}", _format_interval(x.welch, spec), p]
        table.append([name, kind, *cells])
    return table


def _list_effects(effects: Mapping[tuple[ScoredSplit, PaperScore], Sequence[Contrast]]) -> Table:
    """Return the unrounded effects, with one line per effect, score, and set."""
    headings = ["effect", "kind", "score", "split", "difference", "low", "high", "p"]
    table = [[*headings, "welch_low", "welch_high", "method"]]
    missing = (None, None)
    for (split, score), contrasts in effects.items():
        for name, kind, x in ((x.name, x.kind, x.comparison) for x in contrasts):
            values = [x.difference, *(x.interval or missing), x.p, *(x.welch or missing)]
            cells = ("" if value is None else str(value) for value in values)
            method = ("Welch, Bonferroni" if x.p is None else "pooled") if x.interval else ""
            table.append([name, kind, score, split, *cells, method])
    return table


def make_trial_table(results: Results) -> Table:
    """Return a table of the trials in a tuned sweep, with one line per trial."""
    if (tuning := results.sweep.tuning) is None:
        return []
    table = [["row", tuning.field, "seed", "status", "dev_perplexity", "chosen"]]
    for trial in results.trials:
        value = trial.run.config.by_field()[tuning.field]
        score = trial.scores.get("dev", {}).get("perplexity", "")
        is_chosen = tuning.chosen.get(trial.run.row) == value
        row = [trial.run.row, value, trial.run.seed, trial.status, score, is_chosen]
        table.append(list(map(str, row)))
    return table


def _make_markdown(
    results: Results, captions: Mapping[str, str], tabled: Mapping[str, Table]
) -> str:
    answers = answer_factors(results)
    answers |= {name: answer(results, name) for name in results.compared}
    first, *others = (
        f"![{ALTERNATIVES[name]}]({name}.svg)\n\n*{caption}*" for name, caption in captions.items()
    )
    parts = [
        f"**{tables.escape_markdown(question(results))}**",
        *map(tables.escape_markdown, summarize(results)),
        first,
        to_markdown_list([f"{name}: {sentence}" for name, sentence in answers.items()]),
        *(f"{title}:\n\n{tables.to_markdown(table)}" for title, table in tabled.items()),
        *others,
        to_markdown_list(list_footnotes(results)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _make_page(results: Results, figures: Mapping[str, str], tabled: Mapping[str, Table]) -> str:
    """Return the page. The first SVG figure is at the top, and `figures` is keyed by caption."""
    title = html.escape(results.sweep.path.resolve().name)
    (first_caption, first), *others = figures.items()
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in list_footnotes(results))
    folds = [
        *(_fold(title, tables.to_html(table)) for title, table in tabled.items()),
        *(_fold("Figures", _figure(caption, svg)) for caption, svg in others),
        _fold("Methods and notes", f"<ul>\n{notes}\n</ul>"),
    ]
    answers = answer_factors(results)
    for name in results.compared:
        change = results.rows[name].change
        answers[f"{name}: {change}" if change else name] = answer(results, name)
    items = [f"<dt>{html.escape(x)}</dt><dd>{html.escape(y)}</dd>" for x, y in answers.items()]
    listed = "<dl>\n" + "\n".join(items) + "\n</dl>" if items else ""
    sentences = "\n".join(f"<p>{html.escape(x)}</p>" for x in summarize(results))
    style = resources.files("transformer_jax.reports").joinpath("page.css").read_text("utf-8")
    return (
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n<main>\n<h1>{title}</h1>\n"
        f"<h2>{html.escape(question(results))}</h2>\n{sentences}\n"
        f"{_figure(first_caption, first)}\n{listed}\n"
        f"{''.join(folds)}</main>\n</html>\n"
    )


def _figure(caption: str, svg: str) -> str:
    image = svg[svg.index("<svg") :]
    return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n{content}\n</details>\n"
