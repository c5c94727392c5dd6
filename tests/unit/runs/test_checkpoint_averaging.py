import shutil
from pathlib import Path

import numpy as np
import pytest
from run_files import IDENTITY, params_of, steps_on_disk, target_like, write_steps

from transformer_jax.console import format_for_shell
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.progress import Note
from transformer_jax.runs.checkpoint_averaging import (
    average_last_params,
    average_params,
    select_steps,
)
from transformer_jax.runs.checkpoint_manager import CheckpointManager


def test_an_average_is_the_mean_of_scheduled_checkpoints_only(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None})
    target = target_like(params_of(0))["params"]
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert sorted(checkpoints.perplexities) == [1, 2, 4]
        mean = average_params(checkpoints, select_steps(checkpoints, 2), target)
        np.testing.assert_allclose(mean["layer"]["kernel"], 3.0)
        np.testing.assert_allclose(mean["layer"]["bias"], [3.0, 4.0])
        with pytest.raises(UsageError, match=r"cannot average 4 checkpoints: .* only 3") as caught:
            select_steps(checkpoints, 4)
    assert "pass average_checkpoints=1" in str(caught.value)
    assert "pass --average-checkpoints 1" in format_for_shell(caught.value)


@pytest.mark.slow
def test_averages_of_one_pass_are_those_of_separate_passes(tmp_path: Path) -> None:
    write_steps(tmp_path / "c", dict.fromkeys((1, 3, 4, 7), 1.0), keep=4)
    target = target_like(params_of(0))["params"]
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        steps = [1, 3, 4, 7]
        means = average_last_params(checkpoints, steps, target, {3, 1, 4})
        for count, expected, mean in zip((1, 3, 4), (7.0, 14 / 3, 15 / 4), means, strict=True):
            np.testing.assert_allclose(mean["layer"]["kernel"], expected, rtol=1e-6)
            alone = average_params(checkpoints, steps[-count:], target)
            np.testing.assert_array_equal(mean["layer"]["kernel"], alone["layer"]["kernel"])


def test_selected_checkpoints_end_at_the_requested_step(tmp_path: Path) -> None:
    write_steps(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None}, keep=3)
    with CheckpointManager(tmp_path / "run" / "c", IDENTITY) as checkpoints:
        # Checkpoint 3 was not scheduled, so it was deleted after checkpoint 4 was saved.
        assert select_steps(checkpoints) == select_steps(checkpoints, step=5) == [5]
        assert select_steps(checkpoints, step=2) == [2]
        assert select_steps(checkpoints, 2) == select_steps(checkpoints, 2, step=4) == [2, 4]
        assert select_steps(checkpoints, 2, step=2) == [1, 2]
        with pytest.raises(UsageError, match=r"run has no checkpoint at step 3; .*: 1, 2, 4, 5$"):
            select_steps(checkpoints, step=3)
        with pytest.raises(UsageError, match=r"no checkpoint to average at step 5; .*: 1, 2, 4$"):
            select_steps(checkpoints, 2, step=5)
        assert select_steps(checkpoints, 2, step=5, allow_fewer=True) == [5]
        with pytest.raises(UsageError, match=r"to average at step 3; .*: 1, 2, 4, 5$"):
            select_steps(checkpoints, 2, step=3, allow_fewer=True)
        with pytest.raises(UsageError, match=r"average 3 .* has only 2 .* up to step 2;"):
            select_steps(checkpoints, 3, step=2)


def test_an_average_never_spans_a_deleted_checkpoint(tmp_path: Path) -> None:
    # Checkpoint 1 is kept because it has the lowest perplexity. Checkpoints 2 and 3 are deleted.
    write_steps(tmp_path / "c", {1: 1.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0}, keep=2)
    assert steps_on_disk(tmp_path / "c") == {1, 4, 5}
    with CheckpointManager(tmp_path / "c", IDENTITY) as checkpoints:
        assert select_steps(checkpoints, 2) == [4, 5]
        for average, step in ((3, None), (2, 4)):
            with pytest.raises(UsageError, match=rf"cannot average {average} checkpoints"):
                select_steps(checkpoints, average, step)


def test_an_average_contains_no_damaged_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0}, keep=9)

    def selected(damaged: int, average: int, step: int | None = None) -> list[int]:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy)
        try:
            (copy / "c" / str(damaged) / "params" / "one_more").touch()
            with CheckpointManager(copy / "c", IDENTITY) as checkpoints:
                return select_steps(checkpoints, average, step)
        finally:
            shutil.rmtree(copy)

    assert selected(5, 2) == [3, 4]
    assert selected(2, 3) == [3, 4, 5]
    with pytest.raises(UsageError, match="has only 3 that can be averaged;"):
        selected(2, 4)
    with pytest.raises(StorageError, match=r"checkpoint 4 of .* is damaged"):
        selected(4, 2, step=4)


def test_a_checkpoint_whose_metadata_is_damaged_is_reported_and_not_averaged(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run" / "c"
    write_steps(folder, {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0})
    (folder / "4" / "checkpoint.json").write_text("{}")
    with CheckpointManager(folder, IDENTITY) as checkpoints:
        with pytest.warns(Note, match="^checkpoint 4 is damaged and not averaged: checkpoint.json"):
            assert select_steps(checkpoints, 2) == [2, 3]
        with pytest.raises(StorageError, match=r"checkpoint 4 of .* is damaged: checkpoint\.json "):
            select_steps(checkpoints, 2, step=4)
