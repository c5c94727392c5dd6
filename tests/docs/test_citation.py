"""Test that CITATION.cff is valid, so that GitHub shows how to cite the software."""

import subprocess
import sys
from pathlib import Path

from pages import ROOT

CITATION = (ROOT / "CITATION.cff").read_text("utf-8")


def is_valid(text: str, folder: Path) -> bool:
    (folder / "CITATION.cff").write_text(text, "utf-8")
    cffconvert = Path(sys.executable).with_name("cffconvert")
    done = subprocess.run([cffconvert, "--validate"], cwd=folder, capture_output=True)
    return done.returncode == 0


def test_the_citation_follows_the_citation_file_format(tmp_path: Path) -> None:
    assert is_valid(CITATION, tmp_path)


def test_a_citation_without_authors_is_invalid(tmp_path: Path) -> None:
    assert not is_valid(CITATION.replace("\nauthors:", "\nwriters:", 1), tmp_path)
