"""Create a folder once per test session, and share it among all pytest-xdist workers."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(name: str, factory: pytest.TempPathFactory, make: Callable[[Path], object]) -> Path:
    """Create a folder, or wait until another worker in this test session has created it.

    Args:
        name: the folder's name.
        factory: pytest's `tmp_path_factory`.
        make: a function that creates the folder at a given path.
    """
    session = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    path, unfinished = session / name, session / f"{name}-unfinished"
    with (session / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(unfinished)
            unfinished.rename(path)
    return path
