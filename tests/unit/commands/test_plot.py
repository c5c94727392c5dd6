"""Test the `plot` command."""

from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import write_recorded_run, write_untrained_run

from transformer_jax import load
from transformer_jax.cli import main
from transformer_jax.inference.trained_run import Run
from transformer_jax.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "<b>run")


@pytest.mark.parametrize("kind", ["curves", "schedule"])
def test_the_command_draws_what_needs_no_parameters(
    recorded_run: RunFolder, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    assert main(["plot", str(recorded_run.path), "--kind", kind, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    assert all(text in out.read_text() for text in ("train/loss",) * (kind == "curves"))
    assert out.read_text().count("<svg") == 1


def test_the_command_checks_the_file_before_it_draws_and_replaces_no_file(
    recorded_run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.svg").write_text("mine")
    (tmp_path / "x-2.svg").write_text("mine")
    long = f"{'x' * 300}.svg"
    for out, code, message in (
        ("x.svg", 2, "x.svg already exists: write another file with `--out x-3.svg`"),
        ("no/x.svg", 74, "no/x.svg cannot be written: no is not a folder"),
        ("x.svg/x.svg", 74, "x.svg/x.svg cannot be written: x.svg is not a folder"),
        (long, 2, f"{long} cannot be written: File name too long"),
    ):
        # The metric `no` is also invalid, but the command rejects it only when it draws the plot.
        assert main(["plot", str(recorded_run.path), "--metrics", "no", "--out", out]) == code
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["plot", str(recorded_run.path), "--out", "y.svg"]) == 74
    assert "y.svg cannot be written: . is not writable" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "x.svg": "mine",
        "x-2.svg": "mine",
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"positions": "learned"})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=2.0).path)


def test_the_command_says_why_a_run_has_no_such_picture(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SMALL.change(model={"positions": "rotary"})
    rotary = str(write_untrained_run(tmp_path / "rotary", config, steps=(8,)).path)
    config = SMALL.change(model={"num_decoder_layers": 2})
    deeper = str(write_untrained_run(tmp_path / "deeper", config, steps=(8,)).path)
    path, out = str(run.folder.path), str(tmp_path / "x.svg")
    mistakes: dict[tuple[str, ...], str] = {
        (rotary, "--kind", "positions", "--out", out): "with model.positions rotary, positions act",
        (): "plot needs a run",
        (path,): "plot needs an output file: --out curves.svg",
        (path, "--out", "x.gif"): "the file name must end in .svg or .png, got 'x.gif'",
        (path, rotary, "--kind", "heads", "--out", out): "--kind heads accepts one run, got 2",
        (path, "--offset", "2", "--out", out): "--offset is for --kind positions, not curves",
        (path, "--kind", "loss", "--margin", "1", "--out", out): "is for --kind heads, not loss",
        (
            deeper,
            "--kind",
            "heads",
            "--out",
            out,
        ): "same number of layers, but this model has 1 and 2",
        (path, "--kind", "head"): "did you mean 'heads'?",
        (path, "--kind", "heads", "--num-sentences", "0", "--out", out): "pass --num-sentences 256",
        (path, "--out", out): "there are no metrics for run",
    }
    for arguments, message in mistakes.items():
        assert main(["plot", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not Path(out).exists()


@pytest.mark.parametrize(
    "kind", ["positions", *(pytest.param(x, marks=pytest.mark.slow) for x in ("loss", "heads"))]
)
def test_the_command_draws_what_needs_parameters(
    run: Run, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    options = ("--num-sentences", "8") if kind == "heads" else ()
    assert main(["plot", str(run.folder.path), "--kind", kind, *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"written to {out}\n")
    assert ("of 6 heads can be masked" in printed) == (kind == "heads")
    assert out.read_text().count("<svg") == 1
