"""Test the `attention` command on an untrained run."""

from pathlib import Path

import pytest
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.inference.trained_run import Run, load

SOURCE, TARGET = "twenty-one", "einundzwanzig"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(8,), scale=3.0).path)


def test_the_command_writes_a_page_and_prints_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(run.folder.path)
    for name in ("attention.html", "attention-2.html"):
        assert main(["attention", path, SOURCE, TARGET, "--heads", "0", "1"]) == 0
        out = capsys.readouterr().out
        assert out == f"{SOURCE}\n  -> {TARGET}\nwrote {name}\n"
        assert (tmp_path / name).stat().st_size > 10_000
    options = ["--out", "x.svg", "--layer", "-1", "--kind", "decoder", "--view", "alignment"]
    assert main(["attention", path, SOURCE, TARGET, *options]) == 0
    assert "Decoder self-attention, layer 1 of 1" in (tmp_path / "x.svg").read_text("utf-8")


def test_the_command_reports_a_mistake_and_replaces_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.svg").write_text("mine")
    command = ["attention", str(run.folder.path), SOURCE, TARGET]
    for options, code, message in (
        (["--out", "x.svg"], 2, "x.svg already exists: write another file with `--out x-2.svg`"),
        (["--out", "no/x.svg"], 74, "no/x.svg cannot be written: no is not a folder"),
        (["--out", "x.pdf"], 2, "must end in .html, .svg, or .png, got 'x.pdf'"),
        (["--layer", "3"], 2, "layer 3 does not exist: choose one from 0 to 0"),
        (["--heads", "7"], 2, "head 7 does not exist"),
        (["--position", "99"], 2, "position 99 does not exist"),
    ):
        assert main([*command, *options]) == code
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1
    assert main([*command[:2], " "]) == 65
    assert "the source sentence is blank" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    assert (tmp_path / "x.svg").read_text() == "mine"
