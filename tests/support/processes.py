"""Run Python programs and `transformer-jax` commands, in this process or in others.

`Forks` starts commands as forks of a process that has already imported the package; see
`zygote.py`. `make_once` shares a folder among the processes of a test session.
"""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


TESTS = Path(__file__).parents[1]


@dataclasses.dataclass
class Forks:
    """A client that asks the `zygote.py` process to start commands and to wait for them."""

    zygote: subprocess.Popen[str]

    def start(self, *arguments: str, log: Path, **options: Any) -> int:
        """Start a command and return its process ID.

        Args:
            arguments: the command line.
            log: the file to which the process appends its output and errors.
            options: other keyword arguments for `zygote.run`.
        """
        return self._request({"arguments": arguments, "log": str(log), **options})

    def wait(self, pid: int) -> int:
        """Wait for a process; return its exit code, or -N if signal N killed it."""
        return self._request(pid)

    def _request(self, request: Any) -> int:
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.write(json.dumps(request) + "\n")
        self.zygote.stdin.flush()
        return int(self.zygote.stdout.readline())


@contextmanager
def open_forks() -> Iterator[Forks]:
    """Start a process that runs `zygote.py`, and stop it when the context exits."""
    paths = [str(path) for path in (TESTS.parent, TESTS / "support")]
    with subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        yield Forks(process)


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
