"""Execute every small-scale command of the index, at a size that takes seconds.

The commands run in the order of the index and in the same folder, so that each command finds the
runs that earlier items train.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import write_treebank
from pages import ROOT

from experiments.paper.index import ITEMS

# Options that make a command small, keyed by the words with which the command starts.
MODEL = "--model.num-layers 1 --model.d-ff 16"
TRAIN = "--train.steps 2 --train.warmup-steps 1 --train.checkpoint-every 2 --train.log-every 1"
NUMBERS = "--data.num-pairs 60 --data.batch-tokens 256"
SEARCH = "--decode.average-checkpoints 1 --decode.beam-size 1"
SMALLER = {
    "python -m experiments.paper table1": "--exact",
    "python -m experiments.paper table2": "--steps 4",
    "transformer-jax evaluate": "--beam-sizes 1 --alphas 0.6 --averages 1",
    "transformer-jax prepare": NUMBERS,
    "transformer-jax train parsing_small": f"{MODEL} {TRAIN} {SEARCH} --model.d-model 16 "
    "--data.source-vocab-size 60 --data.max-length 32 --data.batch-tokens 256",
    "transformer-jax train": f"{MODEL} {TRAIN} {SEARCH} {NUMBERS}",
    # The models of this sweep have equal sizes, so their widths stay as they are.
    "transformer-jax sweep recurrence": f"--model.num-layers 1 {TRAIN} {SEARCH} {NUMBERS} "
    "--rows conv --seeds 1",
    "transformer-jax sweep smoke": f"{MODEL} {TRAIN} {SEARCH} {NUMBERS} "
    "--rows attention_score-additive+d_k-8 --seeds 1",
    "transformer-jax sweep": f"{MODEL} {TRAIN} {SEARCH} {NUMBERS} --seeds 1",
}
ROWS = {"table3": "A1", "heads": "A1"}


def shrink(command: str) -> str:
    """Return a command with options that reduce its size. A sweep keeps one row besides base."""
    command = re.sub(r" --seeds \d+", "", command)
    command = re.sub(r"(--rows \S+)( (?!--)\S+)*", r"\1", command)
    options = next((x for start, x in SMALLER.items() if command.startswith(start)), "")
    name = command.split()[2]
    rows = f" --rows {ROWS[name]}" if name in ROWS and "--rows" not in command else ""
    return f"{command}{rows} {options}".strip()


def is_sweep(command: str) -> bool:
    return "sweep" in command or "table2" in command


@pytest.mark.parametrize(
    "sweeps",
    [
        pytest.param(False, marks=pytest.mark.slow, id="other_commands"),
        pytest.param(True, marks=pytest.mark.exhaustive, id="sweeps"),
    ],
)
@pytest.mark.timeout(3600)
def test_each_small_scale_command_of_the_index_runs(sweeps: bool, tmp_path: Path) -> None:
    write_treebank(tmp_path / "FOLDER")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    commands = [item.small for item in ITEMS if item.small]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in dict.fromkeys(map(shrink, commands)):
        if is_sweep(command) != sweeps:
            continue
        program, *words = shlex.split(command)
        module = [] if program == "python" else ["-m", "transformer_jax"]
        done = subprocess.run(
            [sys.executable, *module, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "table2" in command:
            rows = [line.split() for line in done.stdout.splitlines()]
            assert [row[5] for row in rows if row[:1] in (["base"], ["big"])] == ["3", "5"]
    assert len(list(tmp_path.glob("figure?.svg"))) == (0 if sweeps else 5)


def test_a_small_command_differs_only_in_its_options() -> None:
    for item in ITEMS:
        words = shlex.split(shrink(item.small)) if item.small else []
        assert words[:3] == shlex.split(item.small)[:3]
    assert shrink("transformer-jax sweep table3 --rows D1 D2 --scale tiny --seeds 3").startswith(
        "transformer-jax sweep table3 --rows D1 --scale tiny --model.num-layers 1"
    )
