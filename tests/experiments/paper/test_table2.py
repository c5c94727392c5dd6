"""Test the training costs of Table 2, and the table of the small models."""

import json
from pathlib import Path

import pytest

from experiments.paper.table2 import TABLE2, estimate_disk, make_small_rows, train_small
from transformer_jax.config.loading import load_config
from transformer_jax.inference.trained_run import load

# The FLOPs in Table 2, which gives one number per model for both language pairs.
PAPER = {"base": 3.3e18, "big": 2.3e19}


def test_the_papers_method_gives_the_papers_flops() -> None:
    for training in TABLE2:
        assert training.paper_flops == pytest.approx(PAPER[training.model], rel=0.01)


def test_counted_flops_are_close_to_those_of_the_papers_method() -> None:
    """The paper's method gives an upper bound on FLOPs if no GPU exceeds its sustained rate."""
    for training in TABLE2:
        assert 0.2 < training.counted_flops / training.paper_flops < 1.5, training


def test_each_row_names_the_config_of_its_model_and_languages() -> None:
    for training in TABLE2:
        config = load_config(training.config)
        assert config.model.d_model == {"base": 512, "big": 1024}[training.model]
        language = {"English-German": "de", "English-French": "fr"}[training.languages]
        assert config.data.languages == ("en", language)


def test_the_disk_holds_the_text_and_the_averaged_checkpoints() -> None:
    base, big = TABLE2[:2]
    # Each checkpoint stores three float32 numbers per parameter. Evaluation averages 5 checkpoints
    # of the base model and 20 of the big model.
    assert estimate_disk(base) > base.text_bytes + 5 * 3 * 4 * 63.05e6
    assert estimate_disk(big) > big.text_bytes + 20 * 3 * 4 * 213e6


@pytest.mark.slow
def test_the_small_table_has_the_bleu_of_the_last_checkpoint_and_of_the_average(
    tmp_path: Path,
) -> None:
    config = make_small_rows(30)["base"].change(
        model={"num_layers": 1, "d_ff": 16},
        data={"num_pairs": 60, "max_digits": None, "batch_tokens": 256},
        train={"warmup_steps": 20, "learning_rate_scale": 1.0},
        decode={"beam_size": 1},
    )
    head, cells = train_small({"base": config}, tmp_path / "table2", seeds=1)
    row = dict(zip(head, cells, strict=True))
    last, averaged = (
        load(tmp_path / "table2/base/seed-0", average_checkpoints=number).evaluate("test")
        for number in (1, 3)
    )
    assert (row["steps"], row["averaged"]) == ("30", "3")
    assert row["BLEU, last checkpoint"] == f"{last.scores.bleu:.1f}"
    assert row["BLEU, averaged"] == f"{averaged.scores.bleu:.1f}"
    lines = (tmp_path / "table2/base/seed-0/metrics.jsonl").read_text("utf-8").splitlines()
    steps = [x for line in lines if (x := json.loads(line))["split"] == "train"]
    assert row["FLOPs (counted)"] == f"{sum(x['flops'] for x in steps):.2g}"
    # The paper multiplies the training time by the peak rate of the devices.
    assert row["FLOPs (paper)"] == f"{sum(x['flops'] / x['utilization'] for x in steps):.2g}"
    # Otherwise, the table could contain the same score twice.
    assert abs(last.scores.bleu - averaged.scores.bleu) > 1
