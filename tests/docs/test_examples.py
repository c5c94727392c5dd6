"""Test that the example model in the repository is complete and can translate."""

import hashlib

import pytest
from pages import ROOT

import transformer_jax

FOLDER = ROOT / "examples" / "multi30k"


def test_the_example_model_is_complete_and_small() -> None:
    lines = [line.split("  ") for line in (FOLDER / "SHA256SUMS").read_text("utf-8").splitlines()]
    assert len(lines) > 10
    for digest, name in lines:
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 6e6


@pytest.mark.slow
def test_the_example_model_translates_a_caption() -> None:
    run = transformer_jax.load(FOLDER)
    assert run.translate(["two dogs play in the snow ."]) == ["zwei hunde spielen im schnee ."]
