"""Test the checks before a run is created. `integration/test_create_run.py` creates runs."""

from pathlib import Path

import pytest
from example_configs import SMALL as EXPERIMENT
from rich.console import Console

from transformer_jax.errors import DataError
from transformer_jax.training.create_run import create_run


def test_a_split_with_sentences_past_the_tables_is_rejected_before_training(tmp_path: Path) -> None:
    table = {"positions": "learned", "max_positions": 25}
    config = EXPERIMENT.change(model=table, data={"max_length": 25})
    with pytest.raises(DataError, match=r"^a source sentence in dev .* 25.*model\.max_positions"):
        create_run(config, tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run").exists()
    clamped = config.change(model={"out_of_range_positions": "clamp"})
    assert create_run(clamped, tmp_path / "run", Console(quiet=True)).config.model == clamped.model
