"""Test that runs survive full and read-only disks, and that memory use does not grow."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL, metrics_of
from training_runs import assert_same, resume, state_of, train

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.errors import StorageError
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training import metric_writer

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # The run writes a report at every step. It saves scheduled checkpoints at steps 3 and 6,
        # and unscheduled checkpoints at all other steps.
        {
            "log_every": 1,
            "checkpoint_every": 3,
            "bleu_every": 100,
            "max_minutes_between_checkpoints": 1e-9,
        },
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)
            for options in (
                {"log_every": 1, "checkpoint_every": 1, "bleu_every": 100},
                {"max_minutes_between_checkpoints": 1e-9},
                {"log_every": 1},
                {"log_every": 100},
                {"checkpoint_every": 1},
                {"checkpoint_every": 100, "keep_checkpoints": 1},
                {"bleu_every": 100},
            )
        ),
    ],
    ids=str,
)
def test_reports_and_checkpoints_change_no_bit(
    whole_run: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = train(SMALL.change(train=options), tmp_path / "run")
    assert_same(state_of(path), state_of(whole_run))


@pytest.mark.exhaustive
def test_a_run_can_end_and_resume_after_every_step(whole_run: Path, tmp_path: Path) -> None:
    # These steps cover the end of an epoch, the learning-rate peak, and both kinds of checkpoint.
    path = train(SMALL.change(train={"steps": 1}), tmp_path / "run")
    for step in range(2, 9):
        resume(path, train={"steps": step})
    assert_same(state_of(path), state_of(whole_run))


def mount(disk: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only the superuser can mount a disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The path to a mounted 2 MiB disk. Tests that are not allowed to mount disks are skipped."""
    path = tmp_path / "disk"
    path.mkdir()
    mount(path, "size=2m")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_74_and_the_run_resumes_when_space_is_free(
    whole_run: Path, half_run: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(half_run, disk / "run"))
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(3 << 20))
    command = ["resume", str(path), "--train.steps", "8"]
    assert main(command) == 74
    message = capsys.readouterr().err
    assert message.startswith("transformer-jax: ")
    assert message.count("\n") == 1
    assert RunFolder.open(path).steps_done == 4
    assert transformer_jax.load(path).step == 4
    filler.unlink()
    assert main(command) == 0
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)


@pytest.mark.parametrize("kind", ["metrics", pytest.param("samples", marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_a_disk_that_fills_during_a_report_ends_the_run_and_it_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_run: Path, kind: str
) -> None:
    write_text = Path.write_text

    def fail(path: Any, *content: Any) -> Any:
        if kind == "metrics" or path.parent.name == "samples":
            raise OSError(28, "No space left on device")
        return write_text(path, *content)

    with monkeypatch.context() as patch:
        if kind == "samples":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(metric_writer, "format_report", fail)
        with pytest.raises(StorageError, match=f"{kind} .*: No space left"):
            train(SMALL, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same(state_of(tmp_path / "run"), state_of(whole_run))
    assert metrics_of(tmp_path / "run") == metrics_of(whole_run)


@pytest.mark.slow
def test_a_run_on_a_read_only_disk_translates_but_training_ends_with_74(
    half_run: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(half_run, disk / "run"))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert len(transformer_jax.load(path).translate(["one"], beam_size=1)) == 1
    capsys.readouterr()
    for command in (
        ["resume", str(path), "--train.steps", "8"],
        ["train", "tiny", "--out", str(disk / "other")],
        ["train", "tiny", "--out", str(disk / "nowhere" / "other")],
    ):
        assert main(command) == 74
        assert capsys.readouterr().err.count("\n") == 1


PROGRAM = """
import json, os, sys
from pathlib import Path
from rich.console import Console
from example_configs import SMALL
import transformer_jax
from transformer_jax.distributed import heartbeat
from transformer_jax.training.create_run import create_run
from transformer_jax.training.components import build_run_components
from transformer_jax.training.loop import run_training

def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

printed = []
class ListConsole(Console):
    def print(self, *texts, **_):
        printed.extend(texts)

steps, num_translations = map(int, sys.argv[2:])
training, beat = [], heartbeat.beat

def measure(step):
    beat(step)
    if step % (steps // 10) == 0:
        training.append(resident_megabytes())

heartbeat.beat = measure
config = SMALL.change(train={"steps": steps, "log_every": 50, "checkpoint_every": steps // 10})
console = ListConsole(quiet=True)
folder = create_run(config, Path(sys.argv[1]), console)
num_shapes = len(build_run_components(folder).batches.buckets)
run_training(folder, console)
run = transformer_jax.load(sys.argv[1])
translation = []
for turn in range(num_translations):
    run.translate(["one", "twenty-two", "nine hundred and ninety-nine"], beam_size=2)
    if turn % (num_translations // 10) == 0:
        translation.append(resident_megabytes())
num_compiled = sum("compiled for" in str(text) for text in printed)
print(json.dumps([training, translation, num_compiled, num_shapes]))
"""


@pytest.mark.exhaustive
def test_a_long_run_uses_no_more_memory_and_compiles_each_shape_once(tmp_path: Path) -> None:
    steps, num_translations = 1500, 150
    arguments = [str(tmp_path / "run"), str(steps), str(num_translations)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=SUPPORT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    training, translation, num_compiled, num_shapes = json.loads(done.stdout.splitlines()[-1])
    assert num_compiled == num_shapes > 1
    # Compare the final memory use, in megabytes, with its level after a warm-up: the first 20% of
    # the steps, or the first 10% of the translations.
    assert training[-1] - np.median(training[1:3]) < 50
    assert translation[-1] - translation[1] < 50


def test_loading_a_run_does_not_lock_it(whole_run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole_run, tmp_path / "run"))
    with exclusive_lock(path):
        assert transformer_jax.load(path).step == 8
