"""Test the command."""

from pathlib import Path

import pytest

from experiments.paper.__main__ import main
from experiments.paper.index import ITEMS, to_markdown
from experiments.paper.table2 import TABLE2


def test_an_existing_folder_is_an_error_before_any_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.md").write_text("old", "utf-8")
    options = ["--lengths", "16", "--widths", "8", "--exact", "--out"]
    assert main(["table1", *options, str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert f"{tmp_path} already exists" in captured.err
    assert captured.out == ""
    assert (tmp_path / "table.md").read_text("utf-8") == "old"
    assert main(["table1", *options, str(tmp_path / "missing/out")]) != 0
    captured = capsys.readouterr()
    assert "is not a folder" in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_a_dry_run_prints_time_disk_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table2", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "3.3e+18" in output
    assert "2.3e+19" in output
    assert output.count(" GB") == len(TABLE2)
    for training in TABLE2:
        assert all(command in output for command in training.commands)


def test_the_command_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"{tmp_path}/figure2.svg"
    assert main(["figure2", "--out", out]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    assert main(["figure2", "--out", out]) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_command_prints_the_index_or_one_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for item in ITEMS:
        commands = "\n".join(item.commands.values()).splitlines()
        assert all(text in output for text in (item.name, item.title, *commands))
    assert main(["equation 3"]) == 0
    output = capsys.readouterr().out
    assert "Equation 3: The learning rate" in output
    assert "Equation 2" not in output
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == to_markdown() + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel1"], "the index has no 'tabel1'; did you mean 'table1'?"),
        (["table3", "--lengths", "64"], "--lengths applies only to table1 or scorespeed"),
        (["--dry-run"], "--dry-run applies only to table2"),
        (["--train"], "--train applies only to table2"),
        (["table2", "--steps", "9"], "--steps needs --train"),
        (["table2", "--train", "--dry-run"], "--train and --dry-run cannot be combined"),
        (["table2", "--train", "--seeds", "0"], "--steps and --seeds must be positive"),
        (["scorespeed", "--widths", "0"], "--lengths and --widths must be positive"),
        (
            ["figure3", "--out", "x.svg"],
            "--out applies only to table1 or table2 or figure1 or figure2",
        ),
        (["figure1", "--out", "x.pdf"], "must end in .svg or .png"),
        (["table1", "--widths", "12"], "--widths must be multiples of 8"),
        (["table1", "--lengths", "1"], "--lengths must be at least 2"),
        (["table1", "--markdown"], "--markdown prints the whole index"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
