"""Trained runs that several test modules compare or copy but do not modify."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_configs import SMALL
from processes import make_once
from training_runs import PRIVATE, share_compiled_steps, train

from transformer_jax.config import Config


def train_once(config: Config, name: str, factory: pytest.TempPathFactory) -> Path:
    """Train a run, or wait until another worker in this test session has trained it."""

    def train_with_secret(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXAMPLE_API_KEY", PRIVATE)
            patch.setenv("https_proxy", f"http://user:{PRIVATE}@localhost:1")
            train(config, path)

    return make_once(name, factory, train_with_secret)


@pytest.fixture(scope="session", autouse=True)
def _shared_steps() -> Iterator[None]:
    """Trace and compile the training step only once for all equivalent runs in a worker."""
    with share_compiled_steps():
        yield


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path to an uninterrupted run of eight steps."""
    return train_once(SMALL, "whole", tmp_path_factory)


@pytest.fixture(scope="session")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path to a run that covers only the first four steps of `whole_run`."""
    return train_once(SMALL.change(train={"steps": 4}), "half", tmp_path_factory)
