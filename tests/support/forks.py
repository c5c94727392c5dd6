"""Start commands as forks of a process that has already imported the package; see `zygote.py`."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    paths = [str(path) for path in (TESTS.parent, TESTS / "support", TESTS / "faults")]
    with subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        yield Forks(process)
