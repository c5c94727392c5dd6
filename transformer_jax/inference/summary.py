"""The HTML summary that a notebook shows for a run: its config, scores, and training history.

The text inherits the page's colors, so it is readable in both light and dark mode.
"""

import html
from collections.abc import Mapping, Sequence

from transformer_jax.config import Config
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.history import (
    SCORE_NAMES,
    metrics_table,
    plot_metrics,
    stored_evaluations,
)
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.visualization.text import printable

FORMATS: Mapping[str, str] = {"perplexity": ".3f", "bleu": ".2f", "chrf": ".2f", "alpha": "g"}
MAX_EVALUATIONS = 12
CELL = "padding:.15em .8em .15em 0;text-align:left;vertical-align:top;white-space:nowrap"
RULE = "border-bottom:1px solid rgba(128,128,128,.4)"


def summarize(folder: RunFolder, steps: Sequence[int], num_parameters: int) -> str:
    """Return the summary as HTML, with all text from the run escaped."""
    kind = "package" if folder.package is not None else "run"
    at = f"step {steps[-1]:,}" if len(steps) == 1 else f"mean of {len(steps)} checkpoints"
    sizes = dict.fromkeys(filter(None, folder.vocabulary.sizes.values()))
    vocabulary = " and ".join(f"{size:,}" for size in sizes)
    facts = f"{at}, {num_parameters:,} parameters, vocabulary of {vocabulary} tokens"
    parts = [
        f"<b>{kind} {html.escape(printable(str(folder.path)))}</b><br>{facts}",
        _section("Differences from the base model", _differences(folder.config)),
        _section("Scores", _scores(folder)),
        _section("Training", _history(folder)),
    ]
    return f'<div style="max-width:60em">{"".join(parts)}</div>'


def _section(title: str, content: str) -> str:
    return f"<details open><summary>{title}</summary>{content}</details>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with escaped text. The first row contains the headings."""
    head, *body = [[html.escape(printable(cell)) for cell in row] for row in rows]
    cells = "".join(f'<th style="{CELL};{RULE}">{cell}</th>' for cell in head)
    lines = [cells, *("".join(f'<td style="{CELL}">{x}</td>' for x in row) for row in body)]
    content = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f'<table style="border-collapse:collapse;margin:.3em 0">{content}</table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def _differences(config: Config) -> str:
    differences = Config().differences(config).items()
    rows = [[".".join(key), str(base), str(here)] for key, (base, here) in differences]
    return html_table([["field", "base", "here"], *rows]) if rows else "<p>none</p>"


def _scores(folder: RunFolder) -> str:
    evaluations = stored_evaluations(folder)[-MAX_EVALUATIONS:]
    if not evaluations:
        return "<p>No scores are stored. The <code>evaluate</code> command stores scores.</p>"
    settings = ["split", "step", "average_checkpoints", "beam_size", "beam_end", "alpha"]
    headings = ["set", "step", "checkpoints", "beam", "beam end", "alpha"]
    headings += ["perplexity", "BLEU", "chrF2"]
    rows = [
        [
            format(row[key], FORMATS.get(key, "")) if key in row else "-"
            for key in (*settings, *SCORE_NAMES)
        ]
        for row in evaluations
    ]
    return html_table([headings, *rows])


def _history(folder: RunFolder) -> str:
    try:
        picture = plot_metrics({folder.path.name: [metrics_table(folder.path)]})
    except (StorageError, UsageError):
        return "<p>no metrics</p>"
    return f'<div style="overflow-x:auto">{picture.svg[picture.svg.index("<svg") :]}</div>'
