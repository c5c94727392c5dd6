"""Test the training costs of Table 2."""

import pytest

from experiments.paper.table2 import TABLE2, estimate_disk
from transformer_jax.config.loading import load_config

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
