# ruff: noqa: T201
"""Count how often the tests try each kind of fault: `python tests/faults/count_trials.py`.

The marker `trials` of a test names the fault. Its second argument is the number of trials in one
run of the test (1 by default), or the name of the test parameter that determines this number.
"""

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


class TrialCounter:
    """A pytest plugin that counts the trials of the collected tests."""

    def __init__(self) -> None:
        self.trials = Counter[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("trials"):
                fault, count = (*mark.args, 1)[:2]
                if isinstance(count, str) and isinstance(item, pytest.Function):
                    value: Any = item.callspec.params[count]
                    count = value if isinstance(value, int) else len(value)
                self.trials[fault] += count


def count_trials() -> Counter[str]:
    """Return the number of trials for each fault in all tests, including exhaustive tests."""
    paths: Sequence[Path] = sorted(TESTS.rglob("test_*.py"))
    marked = [str(path) for path in paths if "mark.trials(" in path.read_text("utf-8")]
    counter = TrialCounter()
    options = ["--collect-only", "-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exit_code = pytest.main([*options, *marked], plugins=[counter])
    assert exit_code == 0, output.getvalue()
    return counter.trials


if __name__ == "__main__":
    for fault, count in sorted(count_trials().items()):
        print(f"{count:6,}  {fault}")
