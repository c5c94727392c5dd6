"""Trained runs for several test modules, which compare or copy them but do not change them."""

import fcntl
import os
from pathlib import Path

import pytest
from small import SMALL
from training_runs import train

from transformer_jax.config import Config


def train_once(config: Config, name: str, factory: pytest.TempPathFactory) -> Path:
    """Train a run, or wait until another worker of this test run has trained it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            train(config, folder / f"{name}-unfinished").rename(path)
    return path


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of an uninterrupted run of eight steps."""
    return train_once(SMALL, "whole", tmp_path_factory)


@pytest.fixture(scope="session")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a run with only the first four steps of `whole_run`."""
    return train_once(SMALL.change(train={"steps": 4}), "half", tmp_path_factory)
