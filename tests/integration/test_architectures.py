"""Test that recurrent and convolutional runs train, resume, translate, and show attention."""

from pathlib import Path

import numpy as np
import pytest
from example_configs import with_architecture
from training_runs import assert_same, resume, state_of, train

import transformer_jax
from transformer_jax.config import Config
from transformer_jax.errors import UsageError

CASES = {
    "rnn": with_architecture("rnn", attention_score="additive", rnn_input_feeding=True),
    "conv": with_architecture("conv", num_layers=2),
}
LINES = ["five", "one hundred and twelve", "forty-two thousand"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_run_resumes_bit_for_bit_translates_and_shows_its_attention(
    config: Config, tmp_path: Path
) -> None:
    whole = train(config, tmp_path / "whole")
    parts = train(config.change(train={"steps": 5}), tmp_path / "parts")
    resume(parts, train={"steps": 8})
    assert_same(state_of(parts), state_of(whole))

    run = transformer_jax.load(whole, average_checkpoints=1)
    together = run.translate(LINES, beam_size=3)
    assert together == [run.translate([line], beam_size=3)[0] for line in LINES]
    [best] = run.translate_best(LINES[:1], 1, beam_size=1)
    assert np.isfinite(best[0].score)

    attention = run.attention(LINES[1], "hundertzwölf")
    assert set(attention.maps) == {"cross"}
    num_layers = {"rnn": 1, "conv": 2}[config.model.architecture]
    assert attention.cross.shape[:2] == (num_layers, 1)
    np.testing.assert_allclose(attention.cross.sum(axis=-1), 1, atol=1e-5)
    for name in ("page.html", "figure.svg"):
        attention.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UsageError, match="kind must be one of cross, got 'encoder'"):
        attention.save(tmp_path / "figure.svg", kind="encoder")
    with pytest.raises(UsageError, match="no attention heads"):
        transformer_jax.head_importance(run)
