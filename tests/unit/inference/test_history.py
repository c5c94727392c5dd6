"""Test that a run's metrics and stored scores can be read without its parameters."""

from pathlib import Path

import pytest
from run_files import HOSTILE, copy_run, write_recorded_run

import transformer_jax
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.inference.history import metrics_table, stored_evaluations
from transformer_jax.inference.summary import summarize
from transformer_jax.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "<b>run")


def test_metrics_are_rows_of_numbers_by_step(run: RunFolder) -> None:
    assert metrics_table(run.path) == [
        {"step": 2, "train/loss": 4.0, "train/time": 1.0},
        {"step": 4, "train/loss": 3.0, "train/time": 2.0, "dev/perplexity": 9.0, "dev/bleu": 1.5},
        {"step": 8, "dev/perplexity": 8.0},
    ]


def test_a_run_without_metrics_has_an_empty_table_and_a_lost_run_has_none(
    run: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="run does not exist: it was moved or deleted"):
        metrics_table(Path("run"))
    folder = copy_run(run, tmp_path / "run", [])
    folder.metrics.unlink()
    assert metrics_table(folder.path) == []
    assert "no metrics" in summarize(folder, (4, 8), 10)
    with pytest.raises(UsageError, match=r"there are no metrics for run$"):
        transformer_jax.compare(folder.path).plot()


def test_stored_evaluations_are_ordered_and_invalid_ones_are_left_out(run: RunFolder) -> None:
    found = [(row["split"], row["step"], row.get("bleu")) for row in stored_evaluations(run)]
    assert found == [(HOSTILE, 8, None), ("test", 4, 10.0), ("test", 8, 20.25)]
