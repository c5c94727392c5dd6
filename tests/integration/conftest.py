"""Trained runs for several test modules, which compare or copy them but do not change them."""

from pathlib import Path

import pytest
from small import SMALL
from training_runs import train


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of an uninterrupted run of eight steps."""
    return train(SMALL, tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="session")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a run of only the first four steps of `whole_run`."""
    config = SMALL.change(train={"steps": 4})
    return train(config, tmp_path_factory.mktemp("runs") / "half")
