"""Test that commands can combine sections from several configs."""

import dataclasses

import pytest
from processes import counts

from transformer_jax.commands.configs import Params
from transformer_jax.commands.sweeps import Sweep
from transformer_jax.config import Config
from transformer_jax.config.loading import load_config


def test_a_config_takes_sections_from_other_configs(capsys: pytest.CaptureFixture[str]) -> None:
    big, tiny, smoke, small = map(load_config, ("big", "tiny", "smoke", "multi30k_small"))
    rows = Params("tiny", "smoke", "multi30k_small", file="big").load_rows()
    assert rows[""].config == Config(big.model, tiny.data, smoke.train, small.decode)
    count = counts(capsys, "base", "--data-from", "tiny", "--model.num-layers", "1")
    assert count["embedding"] == tiny.data.vocab_size * 512


def test_a_row_keeps_its_own_changes_in_a_section_from_another_config() -> None:
    smoke = load_config("smoke").train
    for row, expected in (
        ("base", smoke),
        ("D3", dataclasses.replace(smoke, label_smoothing=0.0)),
        ("big", dataclasses.replace(smoke, steps=3 * smoke.steps)),
    ):
        rows = Params(train_from="smoke", file=f"table3:{row}").load_rows()
        assert rows[row].config.train == expected
        assert rows[row].config.data == load_config("base").data
        # A row's `train` section depends neither on the order of the rows nor on whether the first
        # row is present.
        for others in ((), ("table3:A1",)):
            rows = Sweep(train_from="smoke", files=(f"table3:{row}", *others)).load_rows()
            assert rows[row].config.train == expected
    assert Params(train_from="smoke", file="table3").load_rows()["D3"].config.train == (
        dataclasses.replace(smoke, label_smoothing=0.0)
    )


def test_the_values_of_a_grid_are_not_scaled() -> None:
    for scale in ("tiny", "full"):
        sweep = Sweep(files=("base",), grid=("model.num_layers=2,4",), scale=scale)
        depths = {name: row.config.model.num_layers for name, row in sweep.load_rows().items()}
        assert depths == {"num_layers-2": 2, "num_layers-4": 4}
