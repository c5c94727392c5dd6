"""Test how pages and figures display arbitrary text."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import examples

from transformer_jax.visualization.text import printable, printable_label, truncate


@given(st.text(st.characters(codec=None)))
@examples(200)
def test_any_text_becomes_a_single_line_that_xml_can_contain(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    escaped = shown.replace("&", "&amp;").replace("<", "&lt;")
    assert (ET.fromstring(f"<p>{escaped}</p>").text or "") == shown  # noqa: S314 (our own text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ä中👩\u200d👧", "ä中👩\u200d👧"), ("a\x1b[0m", r"a\x1b[0m"), ("\u202e", r"\u202e")],
)
def test_only_characters_that_change_the_display_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("limit", "expected"), [(5, "abcde"), (6, "abcde"), (4, "abc…"), (1, "…")])
def test_truncated_text_has_at_most_the_given_length(limit: int, expected: str) -> None:
    assert truncate("abcde", limit) == expected


def test_matplotlib_does_not_read_a_label_as_a_formula() -> None:
    assert printable_label("$x$\n") == r"\$x\$\n"
