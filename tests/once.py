"""Folders that one worker of a test session makes and all workers use."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(name: str, factory: pytest.TempPathFactory, make: Callable[[Path], object]) -> Path:
    """Make a folder, or wait until another worker in this test session has made it.

    Args:
        name: the name of the folder.
        factory: pytest's factory of temporary folders.
        make: a function that makes the folder at a given path.
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
