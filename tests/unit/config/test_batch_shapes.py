"""Test that the number of batch shapes grows with the time that a run spends on steps."""

import pytest

from transformer_jax.config import Config
from transformer_jax.config.batch_shapes import choose_num_shapes
from transformer_jax.config.loading import load_config


def chosen(config: Config) -> int:
    """Return the number of shapes for a config."""
    return choose_num_shapes(config.model, config.data, config.train)


@pytest.mark.parametrize(("steps", "shapes"), [(1, 2), (1000, 2), (8000, 4), (100_000, 12)])
def test_a_longer_run_of_the_recipe_has_more_shapes(steps: int, shapes: int) -> None:
    assert chosen(load_config("multi30k").change(train={"steps": steps})) == shapes


def test_a_larger_model_or_batch_has_more_shapes() -> None:
    small = Config().change(model={"num_layers": 1}, train={"steps": 1000})
    base = Config().change(train={"steps": 1000})
    large = base.change(data={"batch_tokens": 100_000})
    assert chosen(small) < chosen(base) < chosen(large)
    gated = base.change(model={"feed_forward": "swiglu", "d_ff": 20_000})
    assert chosen(gated) > chosen(base.change(model={"d_ff": 20_000}))


def test_a_number_of_shapes_in_the_config_is_kept() -> None:
    config = Config().change(data={"max_batch_shapes": 3})
    assert config.with_batch_shapes() == config.with_batch_shapes(5) == config
    assert Config().with_batch_shapes().data.max_batch_shapes == chosen(Config()) == 12
    assert Config().with_batch_shapes(5).data.max_batch_shapes == 5
