"""Test that small models learn to parse and to translate number words, as in the demo."""

import json
from pathlib import Path

import pytest
from corpora import write_treebank
from number_words import fractions_right_by_digits
from rich.console import Console

from transformer_jax.config.loading import load_config
from transformer_jax.evaluation.evaluate import evaluate
from transformer_jax.inference.trained_run import load
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training

ROOT = Path(__file__).parents[2]


# `make test-all` also runs the README's demo, which is the same run with a different seed.
@pytest.mark.exhaustive
def test_the_demo_gets_98_percent_right_with_another_seed(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "configs" / "tiny.py")).change(train={"seed": 1})
    quiet = Console(quiet=True)
    run_training(create_run(config, tmp_path / "run", quiet), quiet)
    finished = load(tmp_path / "run")
    assert evaluate(finished, "test", {}).result["exact"] >= 0.98
    assert min(fractions_right_by_digits(finished).values()) >= 0.98


@pytest.mark.exhaustive
def test_a_small_model_learns_to_parse(tmp_path: Path) -> None:
    config = load_config("parsing_small").change(
        model={"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_k": 16, "d_v": 16},
        data={
            "folder": str(write_treebank(tmp_path / "treebank", train=120)),
            "source_vocab_size": 60,
            "max_length": 32,
            "batch_tokens": 512,
        },
        train={
            "steps": 300,
            "warmup_steps": 100,
            "learning_rate_scale": 0.3,
            "checkpoint_every": 300,
            "bleu_every": 1,
        },
        decode={"average_checkpoints": 1, "max_extra_length": 32},
    )
    quiet = Console(quiet=True)
    run_training(create_run(config, tmp_path / "run", quiet), quiet)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["f1"] == 100
    task = evaluate(load(tmp_path / "run"), "test", {}).result["task"]
    assert (task["f1"], task["repaired"]) == (100, 0)
