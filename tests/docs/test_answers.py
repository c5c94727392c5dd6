"""Test that the demo model gives every answer that the documentation and the commands promise."""

import doctest
import re
import shutil
from pathlib import Path

import pytest
from clones import needs_environment, run, train_demo
from number_words import fractions_right_by_digits, quoted_numbers, wrong_translations
from pages import GUIDES, ROOT, Command, commands
from processes import make_once

import transformer_jax

# Training takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_environment]


@pytest.fixture
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which `make demo` has run. Tests must not change this clone."""
    return make_once("demo", tmp_path_factory, train_demo)


def test_numbers_of_every_length_and_those_in_the_documentation_are_right(demo: Path) -> None:
    finished = transformer_jax.load(demo / "runs/demo")
    assert min(fractions_right_by_digits(finished).values()) >= 0.98
    sources = [*GUIDES, *(ROOT / "transformer_jax").glob("**/*.py")]
    numbers = {number for path in sources for number in quoted_numbers(path.read_text("utf-8"))}
    assert {42, 77, 231} <= numbers
    assert wrong_translations(finished, numbers) == {}


def test_the_demo_prints_its_scores_and_a_command_that_answers_correctly(demo: Path) -> None:
    log = (demo / "demo.log").read_text("utf-8")
    # The last percentage is the score on the test set. Training prints the earlier ones.
    assert float(re.findall(r"exact +([0-9.]+)%", log)[-1]) >= 98
    assert re.search(r"^  by digits   1: \d of 1, 2: \d of 9, 3: \d+ of 90, ", log, re.MULTILINE)
    hints = set(re.findall(r"^(?:next:| {5}) (echo .*)$", log, re.MULTILINE))
    assert hints == {"echo 'forty-two' | transformer-jax translate runs/demo"}
    assert [run(Command(hint, ""), demo) for hint in hints] == ["zweiundvierzig\n"]


def test_the_code_in_a_model_card_translates_correctly(demo: Path, tmp_path: Path) -> None:
    run(Command(f"transformer-jax package runs/demo --out {tmp_path / 'packaged'}", ""), demo)
    [code] = commands(tmp_path / "packaged" / "README.md")
    text = code.text.replace('"packaged"', f'"{tmp_path}/packaged"')
    assert run(Command(text, "", "python"), demo) == "['zweiundvierzig']\n"


def test_the_docstring_of_the_package_shows_what_the_code_prints(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo / "runs/demo", tmp_path / "runs/tiny")
    monkeypatch.chdir(tmp_path)
    # Other tests train, run sweeps, and register parts.
    is_other = re.compile(r"tj\.(train|sweep|report|register)\(")
    found = doctest.DocTestParser().get_examples(transformer_jax.__doc__ or "")
    examples = [example for example in found if not is_other.search(example.source)]
    assert [x.want for x in examples if x.want] == ["['zweiundvierzig']\n", "True\n"]
    names = {"run": transformer_jax.load("runs/tiny")}
    test = doctest.DocTest(examples, names, "transformer_jax", None, None, None)
    doctest.DebugRunner().run(test)
