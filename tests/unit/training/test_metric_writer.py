"""Test that metrics.jsonl and TensorBoard contain the same metrics, even if the run is killed."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from transformer_jax.errors import StorageError
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.metric_writer import MetricWriter, NullWriter

VALUES = {"loss": 2.5, "learning_rate": 1e-3, "flops": 4e9}


def directory(path: Path) -> RunFolder:
    # The metric writer does not use the vocabulary or the fingerprint.
    vocabulary: Any = None
    return RunFolder(path, SMALL, vocabulary, "")


def write(path: Path, *reports: tuple[int, str, dict[str, float]]) -> str:
    """Write reports, and return the lines that appear in the terminal."""
    out = StringIO()
    with MetricWriter(directory(path), Console(file=out), step=0) as writer:
        for report in reports:
            writer.report(*report)
    return out.getvalue()


def events_of(path: Path) -> dict[tuple[str, int], float]:
    events: Any = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return {
        (tag, event.step): event.tensor_proto.float_val[0]
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
        # Hyperparameters and samples are not numbers.
        if event.tensor_proto.float_val
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_terminal_metrics_file_and_tensorboard_get_the_same_values(tmp_path: Path) -> None:
    shown = write(tmp_path, (2, "train", VALUES), (4, "dev", {"perplexity": 12.0}))
    first, second = lines_of(tmp_path)
    assert first["crc32"] != second["crc32"]
    first = {k: v for k, v in first.items() if k not in ("time", "crc32")}
    assert first == VALUES | {"step": 2, "split": "train"}
    assert (second["step"], second["split"], second["perplexity"]) == (4, "dev", 12.0)
    events = events_of(tmp_path)
    assert set(events) == {(f"train/{k}", 2) for k in VALUES} | {("dev/perplexity", 4)}
    for name, value in VALUES.items():
        np.testing.assert_allclose(events[f"train/{name}", 2], value, rtol=1e-6)
    # The files contain the FLOPs, but the terminal does not show them.
    assert shown == ("step 2/8  train  loss 2.500  lr 1.00e-03\nstep 4/8  dev    ppl 12.000\n")


def test_the_progress_bar_shows_the_latest_values_again_after_an_evaluation(tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with MetricWriter(directory(tmp_path), console, step=0) as writer:
        writer.report(2, "train", VALUES)
        writer.set_status("evaluating")
        writer.report(2, "dev", {"perplexity": 12.0})
        writer.advance(3)
    bar = out.getvalue().rpartition("ppl")[2]
    assert "3/8" in bar
    assert "loss 2.500" in bar
    assert "evaluating" not in bar.rpartition("3/8")[2]


def test_events_of_steps_that_are_repeated_do_not_appear_twice(tmp_path: Path) -> None:
    write(tmp_path, (2, "train", VALUES), (4, "train", VALUES))
    # When a killed run resumes, it first removes the metrics of the steps that it repeats.
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    write(tmp_path, (4, "train", {"loss": 2.0}))
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 4]
    assert set(events_of(tmp_path)) == {(f"train/{k}", 2) for k in VALUES} | {("train/loss", 4)}


def test_samples_have_source_hypothesis_and_reference(tmp_path: Path) -> None:
    out = StringIO()
    with MetricWriter(directory(tmp_path), Console(file=out), step=0) as writer:
        writer.write_samples(8, ["one", "two"], ["eins", "drei"], ["eins", "zwei"])
    text = (tmp_path / "samples" / "step-8.txt").read_text("utf-8")
    assert text == "one\n  = eins\n  ~ eins\ntwo\n  = drei\n  ~ zwei\n"
    # The terminal shows a reference only if the hypothesis is different.
    assert out.getvalue() == "    one\n      -> eins\n    two\n      -> drei\n       = zwei\n"


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with MetricWriter(directory(tmp_path), Console(quiet=True), step=0) as writer:
        (tmp_path / "samples").touch()
        with pytest.raises(StorageError, match="samples could not be written: "):
            writer.write_samples(8, ["one"], ["eins"], ["eins"])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match="metrics could not be written: "):
        write(tmp_path / "taken")


def test_a_null_writer_writes_nothing(tmp_path: Path) -> None:
    out = StringIO()
    with NullWriter(directory(tmp_path), Console(file=out, quiet=True), step=0) as writer:
        writer.advance(2)
        writer.set_status("scoring")
        writer.say("a line")
        writer.report(2, "train", VALUES)
    assert list(tmp_path.iterdir()) == []
    assert out.getvalue() == ""
