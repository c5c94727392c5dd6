"""Docstrings, comments, messages, and pages avoid phrases that CONTRIBUTING bans."""

import functools
import re

import pytest
from pages import CODE, passages

BANNED = {
    "report, raise, or print": r"\b(tell|tells|telling|told)\b",
    "N": r"\bso many\b",
    "any, or rephrase": r"\b((who|what|where)ever|whichever(?! is\b))\b",
    "is not a": r"(?<!there )\b(is|are) no (?!longer\b|more than\b|less than\b)",
    "is not one": r"(?<!there )\b(is|are) (?-i:none)\b",
    "its own": r"\bof (its|their|his|one's|your) own\b",
    "resume or continue": r"\b(go|goes|going|gone|went) on\b",
    "is": r"\b(lies|stands) (in|at|on|below|above|beside|beneath|before|there|between)\b",
    "split": r"\bparted\b",
    "next to": r"\bbeside\b",
    "again": r"\banew\b",
    "learned": r"\blearnt\b",
    "except": r"\bbut for\b",
    "must or will": r"\bshall\b",
    "also, so, or before": r"\b(likewise|thereby|ere)\b",
    "95%": r"\d %(?!\w)",
    "begin with the subject": r"(?-i:^Of )(?!course)",
}


@functools.cache
def sentences() -> list[tuple[str, str]]:
    """Return the location and text of each sentence, with code replaced by a placeholder."""
    return [
        (passage.place, CODE.sub("`code`", sentence))
        for passage in passages()
        for sentence in passage.sentences
    ]


@pytest.mark.parametrize("instead", BANNED)
def test_prose_avoids_a_banned_phrase(instead: str) -> None:
    """The ID of each test case says what to write instead of the phrase."""
    pattern = re.compile(BANNED[instead], re.IGNORECASE)
    found = [f"{place}: {text}" for place, text in sentences() if pattern.search(text)]
    assert not found, "\n".join([f"write {instead!r} instead:", *found[:40]])
