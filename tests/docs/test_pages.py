"""Test that every Markdown page renders correctly on GitHub."""

import functools
import re
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pages import PAGES, ROOT, name

from transformer_jax.commands import COMMANDS
from transformer_jax.config import TrainConfig
from transformer_jax.config.validation import ON_RESUME, marked

GITHUB = MarkdownIt("gfm-like", {"linkify": False})
SLUG_DROPS = re.compile(r"[^\w\- ]")
CELL_BORDER = re.compile(r"(?<!\\)\|")
MAX_COLUMNS = 100


@functools.cache
def parse(page: Path) -> list[Token]:
    return GITHUB.parse(page.read_text("utf-8"))


def table_rows(text: str) -> list[list[str]]:
    """Return the rows of each table, excluding the line that separates the header from the body."""
    lines = text.splitlines()
    tables = [token.map for token in GITHUB.parse(text) if token.type == "table_open"]
    return [
        [line for number, line in enumerate(lines[start:end]) if number != 1]
        for start, end in (span for span in tables if span is not None)
    ]


def cell_count(row: str) -> int:
    """Count cells as GitHub does: an unescaped pipe ends a cell, even inside a code span."""
    return len(CELL_BORDER.findall(row.strip().strip("|"))) + 1


def links(tokens: list[Token]) -> list[str]:
    inline = [child for token in tokens for child in token.children or []]
    targets = [str(t.attrs.get("href", "")) for t in inline if t.type == "link_open"]
    return targets + [str(t.attrs.get("src", "")) for t in inline if t.type == "image"]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    found: set[str] = set()
    for heading, content in pairwise(parse(page)):
        if heading.type == "heading_open":
            words = "".join(c.content for c in content.children or [] if c.type != "image")
            slug = SLUG_DROPS.sub("", words.lower()).replace(" ", "-")
            repeats = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", a) is not None for a in found)
            found.add(f"{slug}-{repeats}" if repeats else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_row_of_a_table_has_as_many_cells_as_its_header(page: Path) -> None:
    for header, *rows in table_rows(page.read_text("utf-8")):
        for row in rows:
            assert cell_count(row) == cell_count(header), row


def test_an_unescaped_pipe_in_a_code_span_counts_as_a_cell() -> None:
    ((header, row),) = table_rows("| here | published |\n|---|---|\n| `a|b` | 41.02 |\n")
    assert cell_count(header) == 2
    assert cell_count(row) == 3
    assert cell_count(r"| `a\|b` | 41.02 |") == 2


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in links(parse(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_defines_each_link_label_once(page: Path) -> None:
    """If a label has two definitions, Markdown ignores the second one."""
    environment: dict[str, list[dict[str, str]]] = {}
    GITHUB.parse(page.read_text("utf-8"), environment)
    assert [reference["label"] for reference in environment.get("duplicate_refs", [])] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=name)
def test_lines_and_tables_fit_on_a_screen(page: Path) -> None:
    for line in page.read_text("utf-8").splitlines():
        assert len(line) <= MAX_COLUMNS or line.startswith(("![", "[![")), line


def test_the_readme_has_at_most_200_lines() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_getting_started_lists_every_command_in_the_order_of_the_help() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    tables = text.split("## Commands\n")[1].split("## Config files\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE) == list(COMMANDS)


def test_the_attention_figure_in_the_readme_shows_what_the_text_says() -> None:
    """To predict *tausendfünf*, one head attends to *thousand*, and the others to *five*."""
    figure = (ROOT / "docs" / "figures" / "cross.svg").read_text("utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
    targets = words[words.index("predicted token") + 1 : words.index("source token")]
    sources = words[words.index("source token") + 1 :]
    heads = re.findall(r'<g id="LineCollection_\d+">(.*?)</g>', figure, re.DOTALL)
    assert len(heads) == 4
    line = re.compile(r'"M \S+ (\S+) \nL \S+ (\S+) .*?stroke-opacity: ([\d.]+)', re.DOTALL)
    attended: list[str] = []
    for head in heads:
        lines = [tuple(map(float, numbers)) for numbers in line.findall(head)]
        rows = sorted({start for start, _, _ in lines})
        assert len(rows) == len(targets)
        height, first = rows[1] - rows[0], rows[0]
        of_row = [x for x in lines if x[0] == rows[targets.index("tausendfünf")]]
        _, end, weight = max(of_row, key=lambda x: x[2])
        attended.append(sources[round((end - first) / height)])
        assert weight > 0.5
    assert sorted(attended) == ["▁five", "▁five", "▁five", "▁thousand"]


def test_the_page_about_runs_lists_the_fields_that_may_change_on_resume() -> None:
    text = (ROOT / "docs" / "runs.md").read_text("utf-8")
    [listed] = re.findall(r"and these `train` fields: (.*?)\. Changing", text, re.DOTALL)
    # The page describes the field `steps` above this list.
    assert {*re.findall(r"`(\w+)`", listed), "steps"} == marked(TrainConfig, ON_RESUME)


def test_the_table_of_the_log_lists_every_entry_in_order() -> None:
    text = (ROOT / "experiments/LOG.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(.+)\]\(#", text, re.MULTILINE)
    assert listed == re.findall(r"^## (.+)$", text, re.MULTILINE)
