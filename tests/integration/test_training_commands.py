"""Test that `train` and `resume` print the next commands and save when they receive a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import state_of

from transformer_jax.cli import main

TESTS = Path(__file__).parents[1]


def test_train_and_resume_name_the_next_commands_and_these_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TESTS))
    Path("mine.py").write_text("from small import SMALL as CONFIG\n")
    # The run has fewer scheduled checkpoints than `decode.average_checkpoints`.
    short = ["--train.steps", "2", "--decode.average_checkpoints", "3"]
    assert main(["train", "mine.py", *short, "--decode.beam-size", "1"]) == 0
    command = capsys.readouterr().out.split("next: transformer-jax ")[1].splitlines()[0]
    assert command.startswith("evaluate runs/mine")
    assert main(["evaluate", "runs/mine"]) == 2
    assert "--average-checkpoints 1" in capsys.readouterr().err
    assert main([*command.split(), "--split", "dev"]) == 0
    capsys.readouterr()

    assert main(["train", "mine.py"]) == 2
    message = capsys.readouterr().err
    assert "transformer-jax resume runs/mine" in message
    assert "--out runs/mine-2" in message
    assert main(["resume", "runs/mine", "--train.steps", "3"]) == 0
    assert state_of(Path("runs/mine"))[0] == 3
    assert main(["resume", "runs/mine", "--model.d-k", "4"]) == 2
    assert "model.d_k 8 -> 4" in capsys.readouterr().err


# This test is slow. A test in `test_faults` sends SIGTERM to a process.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_75(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "long.py").write_text(
        "from small import SMALL\nCONFIG = SMALL.change(train={'steps': 100000})\n"
    )
    command = [sys.executable, "-m", "transformer_jax", "train", "long.py", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 75
    assert message.strip().endswith("`transformer-jax resume run`")
    assert len(message.strip().splitlines()) == 1
    step, _ = state_of(tmp_path / "run")
    assert f"{number.name}: saved at step {step};" in message
