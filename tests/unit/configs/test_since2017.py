"""Test the rows of ideas from after 2017."""

from pathlib import Path

import pytest
from example_configs import SMALL, metrics_of
from training_runs import train

import transformer_jax
from transformer_jax.baselines.build import count_parameters
from transformer_jax.config.loading import load_rows
from transformer_jax.config.rows import scale_rows, with_sections

ROWS = load_rows("since2017")
# Some rows also change these fields, in addition to the field for the row's idea.
COMPANIONS = {"d_ff", "feed_forward_bias", "weight_decay", "schedule", "keep_checkpoints"}


def test_every_row_except_combinations_changes_one_thing() -> None:
    base = ROWS["base"].config
    changes = {n: {key for _, key in base.differences(row.config)} for n, row in ROWS.items()}
    assert changes.pop("base") == set()
    assert len(changes.pop("llama")) > 5
    parts = ("pre_norm", "swiglu", "rotary", "muon")
    assert changes.pop("winners") == set().union(*(changes[part] for part in parts))
    assert changes.pop("cosine") == changes.pop("warmup_stable_decay") == {"schedule"}
    assert changes.pop("no_biases") == {"norm", "feed_forward_bias"}
    assert all(len(fields - COMPANIONS) == 1 for fields in changes.values()), changes


def test_gated_rows_have_nearly_as_many_parameters_as_base() -> None:
    base, *gated = (
        count_parameters(ROWS[name].config)["total"] for name in ("base", "swiglu", "geglu")
    )
    assert gated == [pytest.approx(base, rel=0.005)] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "winners", "bpe_dropout", "moving_average"])
def test_a_row_trains_at_small_scale(name: str, tmp_path: Path) -> None:
    rows = {key: ROWS[key] for key in ("base", name)}
    sections = dict.fromkeys(("data", "train"), SMALL)
    config = with_sections(scale_rows(rows, "tiny"), sections)[name].config
    path = train(config.change(model={"max_length": 64}), tmp_path / "run")
    losses = [line["loss"] for line in metrics_of(path) if line["split"] == "train"]
    assert losses[-1] < losses[0]
    assert len(transformer_jax.load(path).translate(["forty-two"])) == 1
