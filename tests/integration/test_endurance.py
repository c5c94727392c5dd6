"""Full and read-only disks, what watching costs, and long runs in little memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from small import SMALL, metrics_of
from test_loop import assert_same, resume, state_of, train

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.errors import StorageError
from transformer_jax.runs.run_directory import RunDirectory
from transformer_jax.training import metric_writer

QUIET = Console(quiet=True)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(SMALL, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize(
    "watching",
    [
        {"log_every": 1},
        {"checkpoint_every": 1},
        {"max_minutes_between_checkpoints": 1e-9},
        *(
            pytest.param(less, marks=pytest.mark.slow)
            for less in (
                {"log_every": 100},
                {"checkpoint_every": 100, "keep_checkpoints": 1},
                {"bleu_every": 100},
            )
        ),
    ],
    ids=str,
)
def test_how_a_run_is_watched_and_saved_changes_no_bit(
    whole: Path, tmp_path: Path, watching: dict[str, Any]
) -> None:
    path = train(SMALL.change(train=watching), tmp_path / "run")
    assert_same(state_of(path), state_of(whole))


@pytest.mark.slow
def test_a_run_may_begin_again_after_each_single_step(whole: Path, tmp_path: Path) -> None:
    # The end of an epoch, the rate's peak and both kinds of checkpoint lie between.
    path = train(SMALL.change(train={"steps": 1}), tmp_path / "run")
    for step in range(2, 9):
        resume(path, train={"steps": step})
    assert_same(state_of(path), state_of(whole))


def mounted(disk: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is for the superuser")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted(path, "size=2m")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_ends_a_run_with_74_and_costs_nothing_but_time(
    whole: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(SMALL.change(train={"steps": 4}), disk / "run")
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(3 << 20))
    command = ["resume", str(path), "--train.steps", "8"]
    began = time.monotonic()
    assert main(command) == 74
    said = capsys.readouterr().err
    assert said.startswith("transformer-jax: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert time.monotonic() - began < 60
    assert RunDirectory.open(path).steps_done == 4
    assert transformer_jax.load(path).step == 4
    filler.unlink()
    assert main(command) == 0
    assert_same(state_of(path), state_of(whole))
    assert metrics_of(path) == metrics_of(whole)


@pytest.mark.parametrize("what", ["metrics", "samples"])
def test_a_disk_that_fills_while_reports_are_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, what: str
) -> None:
    write_text = Path.write_text

    def full(path: Any, *content: Any) -> Any:
        if what == "metrics" or path.parent.name == "samples":
            raise OSError(28, "No space left on device")
        return write_text(path, *content)

    with monkeypatch.context() as patch:
        if what == "samples":
            patch.setattr(Path, "write_text", full)
        else:
            patch.setattr(metric_writer.MetricWriter, "_add_events", full)
        with pytest.raises(StorageError, match=f"{what} could not be written: No space left"):
            train(SMALL, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same(state_of(tmp_path / "run"), state_of(whole))
    assert metrics_of(tmp_path / "run") == metrics_of(whole)


def test_a_run_on_a_read_only_disk_translates_and_is_told_that_it_cannot_go_on(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(SMALL.change(train={"steps": 4}), disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run = transformer_jax.load(path)
    assert len(run.translate(["one"])) == 1
    capsys.readouterr()
    for command in (
        ["resume", str(path), "--train.steps", "8"],
        ["train", "tiny", "--out", str(disk / "other")],
        ["train", "tiny", "--out", str(disk / "nowhere" / "other")],
    ):
        began = time.monotonic()
        assert main(command) == 74
        assert time.monotonic() - began < 10
        assert capsys.readouterr().err.count("\n") == 1


PROGRAM = """
import json, os, sys
from pathlib import Path
from rich.console import Console
from small import SMALL
import transformer_jax
from transformer_jax.training import loop
from transformer_jax.training.create_run import start

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

said = []
class Listening(Console):
    def print(self, *texts, **_):
        said.extend(texts)

steps, decodes = map(int, sys.argv[2:])
grown, advance = [], loop.Logbook.advance

def watched(self, step):
    advance(self, step)
    if step % (steps // 10) == 0:
        grown.append(resident())

loop.Logbook.advance = watched
config = SMALL.change(train={"steps": steps, "log_every": 50, "checkpoint_every": steps // 10})
console = Listening(quiet=True)
folder = start(config, Path(sys.argv[1]), console)
shapes = len(loop.Training(folder, console).batches.shapes)
loop.run_training(folder, console)
run = transformer_jax.load(sys.argv[1])
decoded = []
for turn in range(decodes):
    run.translate(["one", "twenty-two", "nine hundred and ninety-nine"], beam_size=2)
    if turn % (decodes // 10) == 0:
        decoded.append(resident())
compiled = sum("compiled for" in text for text in said)
print(json.dumps({"grown": grown, "decoded": decoded, "compiled": compiled, "shapes": shapes}))
"""


@pytest.mark.parametrize(
    ("steps", "decodes"), [(600, 30), pytest.param(3000, 300, marks=pytest.mark.slow)]
)
def test_a_long_run_takes_no_more_memory_and_compiles_each_shape_once(
    tmp_path: Path, steps: int, decodes: int
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(steps), str(decodes)]
    done = subprocess.run(
        command, cwd=TESTS, env=dict(os.environ), capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["compiled"] == told["shapes"] > 1
    # After warm-up: the first two tenths of the steps, the first of the translations.
    assert told["grown"][-1] - np.median(told["grown"][1:3]) < 50
    assert told["decoded"][-1] - told["decoded"][1] < 50


def test_loading_a_run_does_not_lock_it(whole: Path) -> None:
    from transformer_jax.runs.lock import exclusive_lock

    with exclusive_lock(whole):
        assert transformer_jax.load(whole).step == 8
