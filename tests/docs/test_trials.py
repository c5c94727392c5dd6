"""Test that the documentation quotes the numbers of trials that the tests run."""

import re
import subprocess
import sys

import pytest
from pages import ROOT


@pytest.mark.slow
def test_the_documentation_quotes_the_trials_of_the_tests() -> None:
    script = ROOT / "tests" / "faults" / "count_trials.py"
    done = subprocess.run([sys.executable, script], cwd=ROOT, check=True, capture_output=True)
    lines = (line.split(maxsplit=1) for line in done.stdout.decode().splitlines())
    counted = {fault: trials for trials, fault in lines}
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    table = page[page.index("| fault | guarantee | trials |") :].split("\n\n")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in table.splitlines()[2:]]
    assert {fault: trials for fault, _, trials in rows} == counted
    kills = counted["SIGKILL at a random time"]
    assert f"| {kills} of {kills} kills |" in (ROOT / "README.md").read_text("utf-8")
