"""Test the loss plots, the positional-encoding plot, and the learning-rate plot."""

import math

import numpy as np
import pytest
from example_configs import SMALL
from oracles import floats
from run_files import write_untrained_run

import transformer_jax
from transformer_jax import load, plot_positions
from transformer_jax.analysis.plots import loss_by_length, loss_by_position
from transformer_jax.errors import UsageError
from transformer_jax.inference.trained_run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = SMALL.change(model={"positions": "learned"})
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, config, steps=(8,), scale=2.0).path)


def test_means_by_position_and_length_are_those_of_the_sentences() -> None:
    # Use 20 sentences with 1 token each and 20 sentences with 3 tokens each.
    short, long = [np.array([1.0])] * 20, [np.array([3.0, 2.0, 4.0])] * 20
    by_position = loss_by_position("x", [*long, *short])
    assert (by_position.x.tolist(), by_position.y.tolist()) == ([1, 2, 3], [2.0, 2.0, 4.0])
    half = 1.96 * float(np.std([1.0, 3.0] * 20, ddof=1)) / math.sqrt(40)
    assert by_position.high[0] - 2.0 == pytest.approx(half)
    by_length = loss_by_length("x", [*long, *short])
    assert (by_length.x.tolist(), by_length.y.tolist()) == ([1.0, 3.0], [1.0, 3.0])
    # If a group has too few sentences, it is merged into the previous group.
    few = loss_by_length("x", [*long[:5], *short])
    assert few.y.tolist() == [pytest.approx((20 + 5 * 9) / (20 + 5 * 3))]
    assert loss_by_position("x", [*long[:5], *short]).x.tolist() == [1]


def test_a_learned_table_appears_before_and_after_training(run: Run) -> None:
    axes = {x.get_title(): x for x in plot_positions(run, num_positions=12).figure.axes}
    images = {name: np.asarray(x.images[0].get_array()) for name, x in axes.items() if x.images}
    table = np.asarray(run.params["source_positions"]["positions"])
    np.testing.assert_array_equal(images["learned, after training"], table[:12])
    assert images["learned, before training"].shape == (12, 16)
    assert abs(images["learned, before training"] - table[:12]).max() > 0.1
    np.testing.assert_array_equal(images["sinusoids"][0], [0.0, 1.0] * 8)


def test_positions_that_do_not_exist_are_errors(run: Run) -> None:
    for count in (3, 65):
        with pytest.raises(UsageError, match=f"must be from 4 to 64 for .*, got {count}$"):
            plot_positions(run, num_positions=count)
    for offset in (0, 7):
        with pytest.raises(UsageError, match=f"must be from 1 to 6, .* got {offset}$"):
            plot_positions(run, num_positions=12, offset=offset)


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


def test_the_rate_for_a_base_width_does_not_depend_on_the_width() -> None:
    train = {"steps": 30, "warmup_steps": 20, "base_width": 4}
    [axes] = transformer_jax.plot_schedule(SMALL.change(train=train)).figure.axes
    assert axes.get_title() == "Tuned for d_model 4"
    assert floats(axes.lines[0].get_ydata()).max() == pytest.approx((4 * 20) ** -0.5)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "warmup_stable_decay"])
def test_every_schedule_can_be_drawn(schedule: str) -> None:
    train = {"steps": 30, "warmup_steps": 20, "schedule": schedule, "peak_learning_rate": 1e-3}
    picture = transformer_jax.plot_schedule(SMALL.change(train=train))
    [axes] = picture.figure.axes
    assert axes.get_title() == "Peak at 0.001"
    own = floats(axes.lines[0].get_ydata())
    assert own.max() == pytest.approx(1e-3)
    assert own[-1] == pytest.approx(1e-3 if schedule == "constant" else 0, abs=1e-9)
    # A warmup of 40 steps is longer than the run, so a schedule cannot decay after it.
    assert len(axes.lines) == (4 if schedule == "constant" else 3)
