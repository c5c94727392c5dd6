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
from corpora import sentences, write_treebank
from pages import ROOT

from experiments.paper.index import ITEMS
from transformer_jax.data.trees import read_trees

# Options that make a command small, keyed by the words with which the command starts.
MODEL = "--model.num-layers 1 --model.d-ff 16"
TRAIN = "--train.steps 2 --train.warmup-steps 1 --train.checkpoint-every 2 --train.log-every 1"
NUMBERS = "--data.num-pairs 60 --data.batch-tokens 256"
SEARCH = "--decode.average-checkpoints 1 --decode.beam-size 1"
SMALLER = {
    "python -m experiments.paper table1": "--exact",
    "python -m experiments.paper table2": "--steps 4",
    "transformer-jax evaluate runs/demo": "--beam-sizes 1 --alphas 0.6 --averages 1",
    "transformer-jax prepare": NUMBERS,
    # The parser learns enough to make trees.
    "transformer-jax train parsing_small": f"{SEARCH} --model.num-layers 1 --model.d-model 32 "
    "--model.d-ff 64 --model.dropout 0 --data.source-vocab-size 60 --data.max-length 32 "
    "--data.batch-tokens 256 --train.steps 200 --train.warmup-steps 20 "
    "--train.checkpoint-every 200 --train.learning-rate-scale 1",
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


def write_parsing_data(folder: Path) -> None:
    """Write a treebank whose training split is a folder, and sentences without trees."""
    treebank = write_treebank(folder / "FOLDER")
    (treebank / "train").mkdir()
    (treebank / "train.trees").rename(treebank / "train/gold.trees")
    texts = (" ".join(tree.words) for tree in read_trees(sentences(20, 76), "more"))
    (folder / "SENTENCES").write_text("".join(f"{text}\n" for text in texts), "utf-8")


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
    write_parsing_data(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    commands = "\n".join(item.small for item in ITEMS if item.small).splitlines()
    programs = {"python": sys.executable, "transformer-jax": f"{sys.executable} -m transformer_jax"}
    num_trees: list[str] = []
    for command in dict.fromkeys(map(shrink, commands)):
        if is_sweep(command) != sweeps:
            continue
        program, _, arguments = command.partition(" ")
        done = subprocess.run(
            ["bash", "-c", f"{programs[program]} {arguments}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "table2" in command:
            rows = [line.split() for line in done.stdout.splitlines()]
            assert [row[5] for row in rows if row[:1] in (["base"], ["big"])] == ["3", "5"]
        num_trees += re.findall(r"trees in .*: (\d+) pairs", done.stdout)
    if not sweeps:
        assert len(list(tmp_path.glob("figure?.svg"))) == 5
        silver = (tmp_path / "FOLDER/train/silver.trees").read_text("utf-8").splitlines()
        assert len(silver) > 0
        assert num_trees == ["60", f"{60 + len(silver)}"]


def test_a_small_command_differs_only_in_its_options() -> None:
    for command in "\n".join(item.small for item in ITEMS if item.small).splitlines():
        assert shlex.split(shrink(command))[:3] == shlex.split(command)[:3]
    assert shrink("transformer-jax sweep table3 --rows D1 D2 --scale tiny --seeds 3").startswith(
        "transformer-jax sweep table3 --rows D1 --scale tiny --model.num-layers 1"
    )
