"""Test that a run is bit-identical on any number of CPU cores, with XLA's default flags."""

import os
from pathlib import Path

import pytest
from processes import TESTS, run_python

from transformer_jax.files import read_json
from transformer_jax.runs.run_folder import RunFolder

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(CORES) < 2, reason="this machine has only one usable core"),
]
# With jax 0.10, the bits of this model depend on the number of threads.
PROGRAM = """
import os, sys
folder, cores, steps, *command = sys.argv[1:]
os.sched_setaffinity(0, map(int, cores.split(",")))
sys.path.insert(0, folder)
from example_configs import SMALL
import transformer_jax as tj
from transformer_jax.cli import main

if command:
    sys.exit(main(command))
model = {"d_model": 128, "d_ff": 512, "num_heads": 4, "d_k": 32, "d_v": 32}
train = {"steps": int(steps), "checkpoint_every": 2}
config = SMALL.change(model=model, train=train, data={"batch_tokens": 2048})
tj.train(config, "run", resume=True, quiet=True)
"""


def run(folder: Path, cores: list[int], steps: int = 0, *command: str) -> str:
    arguments = str(TESTS / "support"), ",".join(map(str, cores)), str(steps), *command
    hidden = dict.fromkeys(("XLA_FLAGS", "PJRT_NPROC", "NPROC"), "")
    process = run_python(PROGRAM, *arguments, cwd=folder, PYTHONPATH=str(TESTS.parent), **hidden)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_run_can_continue_and_be_reproduced_on_one_core(tmp_path: Path) -> None:
    run(tmp_path, CORES[:2], 2)
    recorded = read_json(tmp_path / "run" / "run.json")["environment"]
    assert recorded["cpu_threads"] == "2"
    assert RunFolder.open(tmp_path / "run").cpu_threads == 2
    run(tmp_path, CORES[:1], 4)
    output = run(tmp_path, CORES[:1], 0, "reproduce", "run")
    assert "run was reproduced: all parameters are bit-identical" in output
    output = run(tmp_path, CORES[:2], 0, "reproduce", "run", "--out", "on-two-cores")
    assert "run was reproduced: all parameters are bit-identical" in output
