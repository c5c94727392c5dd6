"""Test which actions are due after each step, without a model."""

import dataclasses
import signal
from typing import Any

import pytest

from transformer_jax.config import TrainConfig
from transformer_jax.distributed.processes import Vote
from transformer_jax.training.actions import ActionSchedule, DueActions

CONFIG = TrainConfig(steps=11, log_every=2, checkpoint_every=4)
SCHEDULE = ActionSchedule(CONFIG, steps_per_epoch=7)
NO_VOTE = Vote(0, 0, False)


def due_after(step: int, vote: Vote = NO_VOTE, last_saved: int = 0) -> DueActions:
    return SCHEDULE.after(step, vote, last_saved)


def changed_schedule(**fields: Any) -> ActionSchedule:
    return dataclasses.replace(SCHEDULE, config=dataclasses.replace(CONFIG, **fields))


def steps_with(action: str, schedule: ActionSchedule = SCHEDULE) -> list[int]:
    steps = range(1, schedule.config.steps + 1)
    return [step for step in steps if getattr(schedule.after(step, NO_VOTE, 0), action)]


def test_each_action_is_due_at_its_interval_and_at_the_last_step() -> None:
    assert steps_with("report") == [2, 4, 6, 8, 10, 11]
    assert steps_with("evaluate") == [4, 8, 11]
    assert steps_with("save") == [4, 8, 11]
    assert steps_with("translate", changed_schedule(bleu_every=2)) == [8, 11]
    assert steps_with("interrupt") == []


def test_only_multiples_of_the_interval_are_scheduled_checkpoints() -> None:
    assert steps_with("is_scheduled") == [4, 8]


def test_a_checkpoint_keeps_the_metrics_that_no_scheduled_report_contains() -> None:
    # Step 11 is reported only because it is the last step. In a longer run, the report at step 12
    # would include the metrics of step 11 again.
    assert steps_with("keep_pending_metrics") == [11]
    coarser = changed_schedule(log_every=3)
    assert steps_with("keep_pending_metrics", coarser) == [4, 8, 11]


def test_a_signal_saves_and_ends_the_run_without_an_evaluation() -> None:
    vote = Vote(3, signal.SIGTERM, False)
    due = due_after(3, vote)
    assert due.save
    assert due.interrupt
    assert due.keep_pending_metrics
    assert not due.is_scheduled
    assert not due.evaluate
    assert not due.report


def test_a_signal_at_the_last_step_leaves_the_evaluation_to_the_resumed_run() -> None:
    due = due_after(11, Vote(11, signal.SIGTERM, False))
    assert due == due_after(11)._replace(interrupt=True)


def test_a_signal_at_a_scheduled_step_saves_the_scheduled_checkpoint() -> None:
    due = due_after(4, Vote(4, signal.SIGINT, False))
    assert due.interrupt
    assert due.evaluate
    assert due.is_scheduled


@pytest.mark.parametrize(("last_saved", "is_saved"), [(0, True), (4, True), (5, False), (6, False)])
def test_a_recovery_checkpoint_is_due_unless_one_was_saved_since_the_vote(
    last_saved: int, is_saved: bool
) -> None:
    due = due_after(7, Vote(5, 0, True), last_saved)
    assert due == due_after(7)._replace(save=is_saved, keep_pending_metrics=is_saved)


@pytest.mark.parametrize(
    ("step", "vote", "is_free"),
    [
        (2, NO_VOTE, False),
        (4, NO_VOTE, True),
        (11, NO_VOTE, True),
        (3, NO_VOTE, False),
        (3, Vote(3, signal.SIGTERM, False), True),
        # The timer may trigger only a checkpoint, because results must not depend on the clock.
        (3, Vote(3, 0, True), False),
    ],
)
def test_divergence_is_checked_early_only_at_steps_that_do_not_depend_on_the_clock(
    step: int, vote: Vote, is_free: bool
) -> None:
    assert due_after(step, vote).waits_for_step is is_free


def test_epochs_are_converted_to_steps() -> None:
    assert changed_schedule(checkpoint_every=2, checkpoint_unit="epoch").steps_per_checkpoint == 14
    assert changed_schedule(checkpoint_every=2, checkpoint_unit="step").steps_per_checkpoint == 2


def test_patience_counts_scheduled_checkpoints_since_the_best_perplexity() -> None:
    schedule = changed_schedule(patience=2)
    scores = {4: 9.0, 8: 5.0, 12: 7.0}
    assert not schedule.is_out_of_patience(12, scores)
    # Improving on the previous checkpoint is not enough: the score must be the best so far.
    assert schedule.is_out_of_patience(16, scores | {16: 6.0})
    assert not schedule.is_out_of_patience(16, scores | {16: 4.0})
    # If scores are tied, the first one counts as the best.
    assert schedule.is_out_of_patience(16, scores | {16: 5.0})
    # No checkpoint is scheduled at step 17, so there is no new score.
    assert not schedule.is_out_of_patience(17, scores | {16: 6.0})
    assert not schedule.is_out_of_patience(4, {})
    without_patience = changed_schedule(patience=None)
    assert not without_patience.is_out_of_patience(16, scores | {16: 6.0})
