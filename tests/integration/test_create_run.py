"""Test that runs are created completely or not at all, and can start from existing parameters."""

from pathlib import Path
from typing import Any

import pytest
from small import SMALL
from training_runs import QUIET, assert_same, resume, state_of, train

import transformer_jax
from transformer_jax.errors import UsageError
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training


def test_a_run_starts_with_the_parameters_of_another(whole_run: Path, tmp_path: Path) -> None:
    config = SMALL.change(train={"seed": 3, "steps": 1})
    folder = create_run(config, tmp_path / "next", QUIET, init_from=whole_run)
    other = transformer_jax.load(whole_run)
    run = transformer_jax.load(folder.path)
    assert run.step == 0
    assert_same(run.params, other.params)
    assert run.vocabulary.target.model == other.vocabulary.target.model
    run_training(folder, QUIET)
    assert state_of(folder.path)[0] == 1


def test_a_run_rejects_parameters_of_another_shape(whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do not fit this model"):
        create_run(SMALL.change(model={"d_ff": 48}), tmp_path / "x", QUIET, init_from=whole_run)
    assert not (tmp_path / "x").exists()


def test_a_killed_creation_leaves_nothing_behind(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointManager, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_run(SMALL, tmp_path / "next", QUIET, init_from=whole_run)
    assert not list(tmp_path.iterdir())


TWO_VOCABULARIES = SMALL.change(
    data={"vocab_size": 48, "source_vocab_size": 56}, train={"steps": 1, "bleu_every": 2}
)


def test_source_and_target_can_have_separate_vocabularies(tmp_path: Path) -> None:
    vocabulary = create_run(TWO_VOCABULARIES, tmp_path / "run", QUIET).vocabulary
    assert (len(vocabulary.source), len(vocabulary.target)) == (56, 48)
    # Only the target vocabulary contains German umlauts.
    umlaut = "fünf"
    assert vocabulary.target.decode(vocabulary.target.encode([umlaut])) == [umlaut]
    assert vocabulary.source.decode(vocabulary.source.encode([umlaut])) != [umlaut]


@pytest.mark.exhaustive
def test_a_run_with_two_vocabularies_trains_translates_and_resumes(tmp_path: Path) -> None:
    path = train(TWO_VOCABULARIES, tmp_path / "run")
    run = transformer_jax.load(path)
    assert run.params["source_embedding"]["table"].shape == (56, 16)
    assert run.params["embedding"]["table"].shape == (48, 16)
    assert len(run.translate(["one", "two"])) == 2
    follower = create_run(TWO_VOCABULARIES, tmp_path / "next", QUIET, init_from=path)
    assert follower.vocabulary.source.model == run.vocabulary.source.model
    resume(path, train={"steps": 2})
    assert state_of(path)[0] == 2
