"""A report as one self-contained HTML page: the answers first, and then what they are based on."""

import html
from collections.abc import Mapping
from importlib import resources

from transformer_jax.reports.answers import answer, question, summarize
from transformer_jax.reports.footnotes import list_footnotes
from transformer_jax.reports.results import Results
from transformer_jax.reports.tables import Table, to_html


def make_page(results: Results, figures: Mapping[str, str], tables: Mapping[str, Table]) -> str:
    """Return the page. The first SVG figure is at the top, and `figures` is keyed by caption."""
    title = html.escape(results.sweep.path.resolve().name)
    (first_caption, first), *others = figures.items()
    notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in list_footnotes(results))
    folds = [
        *(_fold(title, to_html(table)) for title, table in tables.items()),
        *(_fold("Figures", _figure(caption, svg)) for caption, svg in others),
        _fold("Methods and notes", f"<ul>\n{notes}\n</ul>"),
    ]
    sentences = "\n".join(f"<p>{html.escape(x)}</p>" for x in summarize(results))
    style = resources.files("transformer_jax.reports").joinpath("page.css").read_text("utf-8")
    return (
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n<main>\n<h1>{title}</h1>\n"
        f"<h2>{html.escape(question(results))}</h2>\n{sentences}\n"
        f"{_figure(first_caption, first)}\n{_list_answers(results)}\n"
        f"{''.join(folds)}</main>\n</html>\n"
    )


def _list_answers(results: Results) -> str:
    lines = [
        f"<dt>{html.escape(f'{name}: {row.change}' if row.change else name)}</dt>"
        f"<dd>{html.escape(answer(results, name))}</dd>"
        for name, row in results.rows.items()
        if name in results.compared
    ]
    return "<dl>\n" + "\n".join(lines) + "\n</dl>" if lines else ""


def _figure(caption: str, svg: str) -> str:
    image = svg[svg.index("<svg") :]
    return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n{content}\n</details>\n"
