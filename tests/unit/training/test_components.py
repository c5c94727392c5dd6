"""Test the parts that a run is built from, and the lines that describe them."""

import dataclasses
from pathlib import Path

import pytest
from example_configs import SMALL
from training_runs import QUIET

from transformer_jax.errors import DataError
from transformer_jax.model.inspect import parameter_counts
from transformer_jax.training.components import RunComponents, build_run_components
from transformer_jax.training.create_run import create_run
from transformer_jax.training.flops import flops_of_lengths


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return build_run_components(create_run(SMALL, tmp_path_factory.mktemp("runs") / "run", QUIET))


def test_the_summary_states_the_size_of_the_model_and_of_the_data(
    components: RunComponents,
) -> None:
    summary = "\n".join(components.summary())
    size = parameter_counts(components.model)["total"]
    assert f"1+1 layers, d_model 16, {size:,} parameters" in summary
    num_pairs = len(components.batches.source.offsets) - 1
    assert f"{num_pairs} pairs, vocabulary of 64 tokens" in summary


def test_the_flops_of_a_step_are_those_of_its_batch(components: RunComponents) -> None:
    model = components.model
    for step in (1, 2):
        lengths = components.batches.lengths(step - 1)
        expected = flops_of_lengths(model.config, model.vocab_size, *lengths)
        assert components.step_flops(step) == expected > 0


def test_a_run_whose_text_has_changed_is_not_built(tmp_path: Path) -> None:
    folder = create_run(SMALL, tmp_path / "run", QUIET)
    with pytest.raises(DataError, match="is not the text that the run was created with"):
        build_run_components(dataclasses.replace(folder, fingerprint="0" * 64))
