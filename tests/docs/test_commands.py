"""Test that the commands in the README and the docs have labels and print what the pages show."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from clones import DEMO, make_clone, needs_environment, run, train_demo
from pages import GUIDES, Command, commands, name
from processes import Forks, make_once

LABELS = re.compile(
    r"\d+ (s|min)\b|needs (a GPU|a TPU|a browser|a bucket|a run|Docker|Kubernetes|Slurm|gcloud"
    r"|hours|minutes|moto|root|the network|the sweep|wandb)\b"
)
# Skip these commands, because they would run the tests again or need a different environment.
RECURSIVE = ("make test", "make check", "make docs", "pre-commit install")
# These commands build a model for every row of Table 3. CHEAP excludes these commands, so only the
# slow whole-page tests run them. `test_configs` and `test_sweeps` run the same commands for a few
# rows.
ALL_ROWS = re.compile(r"transformer-jax (params|sweep) table3\b")
CHEAP = sorted(
    {c.text for page in GUIDES for c in commands(page) if c.is_cheap and not ALL_ROWS.match(c.text)}
    - {*RECURSIVE}
)
# These commands import JAX, so they run in forks of a process that has already imported it. The
# other commands run in a shell, to test that the shell finds `transformer-jax` in an activated
# environment.
SLOW_TO_IMPORT = tuple(f"transformer-jax {name} " for name in ("params", "prepare", "sweep"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_every_command_has_a_label(page: Path) -> None:
    for command in commands(page):
        assert LABELS.match(command.label), command


def test_an_output_that_the_page_does_not_show_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\na  # 1 s\nb  # 1 s\n```\n\n```text\n1 ... two\nend\n```\n", "utf-8")
    first, last = commands(page)
    assert (first.output, first.shows("anything")) == (None, True)
    assert last.shows("1 0.5 two\nend\n")
    assert not last.shows("1 0.5 three\nend\n")
    assert not last.shows("1 0.5 two\nend\nmore\n")


@pytest.mark.slow
@needs_environment
@pytest.mark.parametrize("text", CHEAP)
def test_a_cheap_command_works_in_a_fresh_clone(
    text: str, clone: Path, request: pytest.FixtureRequest
) -> None:
    if not text.startswith(SLOW_TO_IMPORT):
        run(Command(text, ""), clone)
        return
    forks: Forks = request.getfixturevalue("forks")
    log = clone / "log"
    pid = forks.start(*shlex.split(text)[1:], log=log, folder=str(clone))
    assert forks.wait(pid) == 0, log.read_text("utf-8")


def remaining(page: Path) -> list[Command]:
    """Return a page's tested commands, except those in `RECURSIVE` and `CHEAP`."""
    tested = [c for c in commands(page) if c.is_tested and c.text not in RECURSIVE]
    return [c for c in tested if c.output is not None or c.text not in CHEAP]


PICTURE = re.compile(r"(?:--out |\.save\(\")([\w./-]+\.(?:html|png|svg))\b")

# The demo model is trained only once, and the commands on each of these pages use a copy of it.
USE_DEMO = tuple(page for page in GUIDES if "runs/demo" in page.read_text("utf-8"))
# Some commands on these pages use the outputs of commands on other pages, so a single test runs the
# commands from all of these pages in the same clone.
TOGETHER = tuple(
    page for page in USE_DEMO if re.search("sweeps/heads|runs/other", page.read_text("utf-8"))
)
ALONE = tuple((page,) for page in GUIDES if page not in TOGETHER and remaining(page))
# The commands on these pages train for minutes, and few changes affect them.
SLOWEST = ("docs/beyond-translation.md", "docs/paper.md")

WHOLE_PAGES = [
    pytest.param(
        pages,
        id=name(pages[0]),
        marks=pytest.mark.exhaustive if name(pages[0]) in SLOWEST else pytest.mark.slow,
    )
    for pages in (TOGETHER, *ALONE)
]


def test_each_picture_has_a_name_of_its_own() -> None:
    # `plot` and `attention` do not overwrite files.
    texts = {command.text for page in USE_DEMO for command in commands(page)}
    pictures = [picture for text in texts for picture in PICTURE.findall(text)]
    assert len(pictures) >= 8
    assert sorted(set(pictures)) == sorted(pictures)


@needs_environment
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pages", WHOLE_PAGES)
def test_the_commands_of_a_page_work_in_order_and_print_what_the_page_shows(
    pages: tuple[Path, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_clone(tmp_path)
    if set(pages) & set(USE_DEMO):
        trained = make_once("demo", tmp_path_factory, train_demo)
        shutil.copytree(trained / "runs" / "demo", folder / "runs" / "demo")
    shown = [command for page in pages for command in remaining(page) if command.text != DEMO]
    for text, command in {command.text: command for command in shown}.items():
        output = run(command, folder)
        for one in shown:
            assert one.text != text or one.shows(output), f"{text}\n{one.output}\n{output}"
