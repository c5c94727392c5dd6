"""Test that the commands in messages can be executed as printed."""

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from transformer_jax.cli import main

COMMAND = re.compile(r"transformer-jax (?:[^\n`;|<]|<(?= ))+")


def printed_commands(
    capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> list[list[str]]:
    """Run a command, and return the words of each command that it prints."""
    assert main(words) == code
    out, err = capsys.readouterr()
    found = [match[0].split(" < ")[0] for match in COMMAND.finditer(out + err)]
    return [shlex.split(command)[1:] for command in found]


def test_printed_commands_succeed_for_a_run_whose_name_starts_with_a_dash(
    whole_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole_run, "-run")
    shutil.rmtree("-run/evaluations", ignore_errors=True)
    commands = [
        *printed_commands(capsys, "resume", "./-run"),
        *printed_commands(capsys, "train", "tiny", "--out=-run", code=2)[:1],
        *printed_commands(capsys, "report", "./-run", "--out=out", code=2),
        *printed_commands(capsys, "package", "./-run", "--out=-package"),
    ]
    names = [command[0] for command in commands]
    assert sorted(set(names)) == ["evaluate", "resume", "translate"]
    for command in dict.fromkeys(map(tuple, commands)):
        text = io.TextIOWrapper(io.BytesIO(b"one\n"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", text)
        assert main(command) == 0, command
    capsys.readouterr()
