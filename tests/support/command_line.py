"""Run Python programs and `transformer-jax` commands, and return their output."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.cli import main


def run_python(
    code: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a separate Python process, which does not check array shapes."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def run_clean_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without environment variables for JAX, XLA, TensorFlow, and pytest."""
    hidden = ("JAX_", "PYTEST_", "XLA_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def mistake(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int = 2) -> str:
    """Run a command that must fail, and return its one-line error message."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert err.startswith("transformer-jax: ")
    return err


def counts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run `transformer-jax params --json` and return its parsed output."""
    assert main(["params", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
