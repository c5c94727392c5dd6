"""The HTML summary that a notebook shows for a run: its config, scores, and training history.

The summary inherits the page's colors, so it is readable in both light and dark mode.
"""

import html
import math
from collections.abc import Mapping, Sequence

from transformer_jax.config import Config
from transformer_jax.inference.history import (
    SCORE_NAMES,
    metric_by_step,
    metrics_table,
    stored_evaluations,
)
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.visualization.text import printable

# The metrics that the summary plots, with their number formats.
CURVES = {"train/loss": ".3f", "dev/perplexity": ".3f", "dev/bleu": ".1f"}
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
        return "<p>none stored by the command evaluate</p>"
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
    table = metrics_table(folder)
    panels: list[str] = []
    for name, spec in CURVES.items():
        values = metric_by_step(table, name)
        if curve := inline_curve(list(values), list(values.values())):
            step, last = max(values.items())
            title = f"{name} {last:{spec}} at step {step:,}"
            label = f'<figcaption style="font-size:smaller">{title}</figcaption>'
            panels.append(f'<figure style="margin:.3em 1em .3em 0">{curve}{label}</figure>')
    if not panels:
        return "<p>no metrics</p>"
    return f'<div style="display:flex;flex-wrap:wrap">{"".join(panels)}</div>'


def inline_curve(
    x: Sequence[float], y: Sequence[float], *, width: int = 240, height: int = 60
) -> str:
    """Return a curve as inline SVG for HTML, or "" if there are fewer than two distinct x values.

    The curve has the same color as the surrounding text. The axes are linear and extend from the
    lowest to the highest value. Points with non-finite coordinates are omitted.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len({a for a, _ in points}) < 2:
        return ""
    margin = 4
    x_low, x_high = (f(a for a, _ in points) for f in (min, max))
    y_low, y_high = (f(b for _, b in points) for f in (min, max))
    x_scale = (width - 2 * margin) / (x_high - x_low)
    y_scale = (height - 2 * margin) / ((y_high - y_low) or 1.0)
    coordinates = " ".join(
        f"{margin + (a - x_low) * x_scale:.1f},{height - margin - (b - y_low) * y_scale:.1f}"
        for a, b in points
    )
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f'<polyline points="{coordinates}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        "</svg>"
    )
