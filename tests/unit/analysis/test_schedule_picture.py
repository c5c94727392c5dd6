"""Test the learning-rate figure."""

import pytest
from example_configs import SMALL
from oracles import floats

import transformer_jax


def test_the_schedule_shows_the_config_and_its_peak() -> None:
    picture = transformer_jax.plot_schedule(SMALL.change(train={"steps": 100, "warmup_steps": 20}))
    widths, warmups = picture.figure.axes
    assert str(widths.lines[0].get_label()) == "d_model 16"
    assert [str(line.get_label()) for line in warmups.lines] == [
        *("warmup 20", "warmup 5", "warmup 10", "warmup 40")
    ]
    for axes in (widths, warmups):
        own = axes.lines[0]
        # The curve's maximum is the peak learning rate of equation 3.
        assert floats(own.get_ydata()).max() == pytest.approx(16**-0.5 * 20**-0.5)
