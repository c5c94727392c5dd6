"""Test that the tiny model learns the demo's task: to translate English number words to German."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from transformer_jax.config.loading import load_config
from transformer_jax.inference.evaluate import evaluate
from transformer_jax.inference.trained_run import load
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training

ROOT = Path(__file__).parents[2]


# `make test-all` also runs the README's demo, which learns the same task in more steps.
@pytest.mark.slow
def test_the_tiny_model_learns_number_words(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "configs" / "tiny.py")).change(
        train={"steps": 280, "checkpoint_every": 280}
    )
    quiet = Console(quiet=True)
    path = tmp_path / "run"
    run_training(create_run(config, path, quiet), quiet)
    last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["split"] == "dev"
    assert last["exact"] > 0.9
    run = load(path, average_checkpoints=1)
    assert run.translate(["two hundred and thirty-one thousand, five hundred and sixty-seven"]) == [
        "zweihunderteinunddreißigtausendfünfhundertsiebenundsechzig"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_gets_98_percent_right_with_other_seeds(tmp_path: Path, seed: int) -> None:
    config = load_config(str(ROOT / "configs" / "tiny.py")).change(train={"seed": seed})
    quiet = Console(quiet=True)
    run_training(create_run(config, tmp_path / "run", quiet), quiet)
    assert evaluate(load(tmp_path / "run"), "test", {}).result["exact"] >= 0.98
