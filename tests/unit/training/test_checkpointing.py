"""Test that a checkpoint restores the state and the pending metrics of a run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from example_configs import SMALL
from training_runs import QUIET, assert_same

from transformer_jax.errors import StorageError
from transformer_jax.training.checkpointing import Checkpointer
from transformer_jax.training.components import RunComponents, build_run_components
from transformer_jax.training.create_run import create_run
from transformer_jax.training.step import init_state

PENDING = [[3.0, 2.0, 8.0], [0.0, 0.0, 0.0]]


@pytest.fixture
def run(tmp_path: Path) -> RunComponents:
    return build_run_components(create_run(SMALL, tmp_path / "run", QUIET))


def save(run: RunComponents, step: int) -> None:
    """Save the initial state as the state of a step, with made-up counters and metrics."""
    state = init_state(run.model, run.folder.config.train)
    state = state._replace(skipped=jnp.int32(3), skipped_in_a_row=jnp.int32(1))
    with Checkpointer(run) as checkpointer:
        checkpointer.save(step, state, PENDING, None, 0)
        checkpointer.wait()


def test_a_new_run_starts_with_the_initial_state(run: RunComponents) -> None:
    with Checkpointer(run) as checkpointer:
        state, pending = checkpointer.restore()
        assert (checkpointer.last_step, pending) == (0, [])
    assert_same(state.params, init_state(run.model, SMALL.train).params)


def test_a_checkpoint_restores_the_arrays_the_counters_and_the_pending_metrics(
    run: RunComponents,
) -> None:
    save(run, 5)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.last_step == 5
        state, pending = checkpointer.restore()
    assert pending == PENDING
    assert [int(x) for x in (state.step, state.skipped, state.skipped_in_a_row)] == [5, 3, 1]
    expected = init_state(run.model, SMALL.train)
    assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert jax.tree.leaves(state.params)[0].sharding.is_fully_replicated


def test_invalid_metadata_is_a_storage_error(
    run: RunComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 5)
    with Checkpointer(run) as checkpointer:
        monkeypatch.setattr(checkpointer.manager, "metadata", lambda _: {"pending_metrics": [1]})
        with pytest.raises(StorageError, match="checkpoint 5 has invalid metadata"):
            checkpointer.restore()
