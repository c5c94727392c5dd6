"""Test that tracing does not change results, and that a run fails if it cannot write its trace."""

import gzip
import io
import json
import shutil
from pathlib import Path

import pytest
from example_configs import SMALL, metrics_of
from rich.console import Console
from training_runs import QUIET, assert_same, resume, state_of, train

from transformer_jax.errors import StorageError
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training


@pytest.mark.slow
def test_a_trace_changes_no_bit(whole_run: Path, tmp_path: Path) -> None:
    path = train(SMALL.change(train={"profile": 3}), tmp_path / "run")
    assert_same(state_of(path), state_of(whole_run))
    assert metrics_of(path) == metrics_of(whole_run)
    assert not (whole_run / "profile").exists()
    # The first file is for TensorBoard, and the second is for Perfetto.
    assert list(path.glob("profile/plugins/profile/*/*.xplane.pb"))
    [trace] = path.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = " ".join(event.get("name", "") for event in events)
    # The trace contains the training step and its device operations.
    assert "train_step" in names
    assert "fusion" in names


@pytest.mark.exhaustive
def test_a_resumed_run_adds_a_trace_and_keeps_it_if_the_run_ends_first(
    half_run: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(half_run, tmp_path / "run"))
    resume(path, train={"steps": 8, "profile": 1})
    resume(path, train={"steps": 12, "profile": 100})
    assert len(list(path.glob("profile/plugins/profile/*"))) == 2


def test_a_run_that_ends_before_its_trace_begins_says_so(tmp_path: Path) -> None:
    config = SMALL.change(train={"profile": 1, "steps": 2})
    folder, out = create_run(config, tmp_path / "run", QUIET), io.StringIO()
    run_training(folder, Console(file=out, width=200))
    assert "note: no steps are traced, because tracing would start after step 2\n" in out.getvalue()
    assert not (folder.path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    folder = create_run(SMALL.change(train={"profile": 1}), tmp_path / "run", QUIET)
    (folder.path / "profile").touch()
    with pytest.raises(StorageError, match="profile"):
        run_training(folder, QUIET)
