"""Test that every command and test in the paper index exists."""

import ast
import re
import shlex

import pytest
from pages import ROOT, commands

from experiments.paper.__main__ import Paper
from experiments.paper.index import ITEMS, Item, to_markdown
from transformer_jax.commands import COMMANDS
from transformer_jax.commands.arguments import given_fields, parse
from transformer_jax.commands.base import ConfigCommand


def check_test_exists(test: str) -> None:
    path, _, function = test.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


def check_command(command: str) -> None:
    """Parse a command as `transformer-jax` or `experiments.paper` does, and load its configs.

    If the command runs pytest, check that its test exists.
    """
    program, name, *rest = shlex.split(command)
    if program == "python":
        module, *arguments = rest
        assert name == "-m"
        if module == "pytest":
            check_test_exists(arguments[0])
        elif module == "experiments.paper":
            parse("paper", Paper, arguments)
        else:
            assert module == "experiments.paper.silver_trees"
        return
    assert program == "transformer-jax"
    parsed = parse(name, COMMANDS[name], rest[: rest.index("<")] if "<" in rest else rest)
    if isinstance(parsed, ConfigCommand):
        # Changing every row would take seconds, so change only the first row.
        first = next(iter(parsed.load_rows().values()))
        first.config.change(**given_fields(parsed.config, rest))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.key)
def test_every_test_exists_and_every_command_parses(item: Item) -> None:
    check_test_exists(f"tests/{item.test}")
    for command in "\n".join(item.commands.values()).splitlines():
        check_command(command)


def test_the_index_has_every_equation_figure_and_table_of_the_paper() -> None:
    names = [item.name for item in ITEMS]
    expected = [f"Equation {i}" for i in (1, 2, 3)] + [f"Figure {i}" for i in range(1, 6)]
    expected += [f"Table {i}" for i in (1, 2, 3, 4)]
    # The first item trains the models that the figures use.
    assert names[: len(expected) + 1] == ["Models", *expected]
    assert len({item.key for item in ITEMS}) == len(ITEMS)


@pytest.mark.parametrize("scale", ["small", "full"])
def test_an_earlier_item_trains_each_run_that_a_command_uses(scale: str) -> None:
    made: set[str] = set()
    used: list[str] = []
    texts = "\n".join(item.small if scale == "small" else item.full for item in ITEMS)
    for command in filter(None, texts.splitlines()):
        words = shlex.split(command)
        runs = [word for word in words if word.startswith("runs/")]
        if "train" in words:
            made |= set(runs)
        else:
            assert made >= set(runs), command
            used += runs
    assert len(used) >= 5


def test_figure_3_selects_the_papers_word_in_the_papers_sentence() -> None:
    [figure] = [item for item in ITEMS if item.key == "figure3"]
    words = shlex.split(figure.full)
    [sentence] = [word for word in words if " " in word]
    assert sentence == (
        "It is in this spirit that a majority of American governments have passed new laws since "
        "2009 making the registration or voting process more difficult ."
    )
    assert sentence.split()[int(words[words.index("--position") + 1])] == "making"


def test_commands_at_the_papers_scale_use_the_papers_models() -> None:
    full = "\n".join(item.commands.get("the paper's scale", "") for item in ITEMS)
    for command in filter(None, full.splitlines()):
        words = shlex.split(command)
        if words[0] != "transformer-jax" or words[1] not in ("train", "sweep"):
            continue
        parsed = parse(words[1], COMMANDS[words[1]], words[2:])
        assert isinstance(parsed, ConfigCommand)
        first = next(iter(parsed.load_rows().values())).config
        assert first.model.d_model >= 512, command
        assert first.data.corpus in ("tfds", "trees"), command


def test_the_recurrence_sweep_is_that_of_its_page() -> None:
    [item] = [item for item in ITEMS if item.key == "section1"]
    texts = (command.text for command in commands(ROOT / "docs/recurrence.md"))
    assert any(" ".join(text.replace("\\\n", " ").split()).endswith(item.full) for text in texts)


def test_the_small_warmup_sweep_needs_no_corpus() -> None:
    [item] = [item for item in ITEMS if item.key == "section5.3"]
    _, name, *rest = shlex.split(item.small)
    parsed = parse(name, COMMANDS[name], rest)
    assert isinstance(parsed, ConfigCommand)
    rows = parsed.load_rows()
    assert {row.config.data.corpus for row in rows.values()} == {"number_words"}
    trains = [row.config.train for row in rows.values()]
    settings = {(train.learning_rate_scale, train.warmup_steps) for train in trains}
    assert len(settings) == len(trains) > 1


def test_the_page_contains_the_index() -> None:
    page = (ROOT / "docs/paper.md").read_text("utf-8")
    command = "python -m experiments.paper --markdown"
    assert to_markdown() in page, f"paste the output of `{command}` into docs/paper.md"


def test_a_line_of_the_index_does_not_end_between_an_option_and_its_value() -> None:
    assert not re.search(r" --[\w.-]+ \\$", to_markdown(), re.MULTILINE)
