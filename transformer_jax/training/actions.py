"""Pure functions that choose the actions after a step, given the combined vote of all processes.

Steps are numbered from 1. In a run with several processes, the vote is from an earlier step (see
`StepConsensus`).

A scheduled checkpoint is saved at a fixed step and has scores: the perplexity and the smoothed loss
on the development set. Checkpoints that are saved for recovery, after a signal, or at an
unscheduled last step have no scores, so timing and signals do not affect which checkpoints are
averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transformer_jax.config import TrainConfig
from transformer_jax.distributed.processes import Vote


class DueActions(NamedTuple):
    """The actions after a step, in this order: report, save, and then interrupt or evaluate."""

    report: bool
    evaluate: bool
    """Whether to compute the scores on the development set. If true, `save` is also true. If
    `interrupt` is true, the resumed run evaluates the checkpoint instead."""
    translate: bool
    """Whether the evaluation also translates the development set to compute BLEU."""
    save: bool
    is_scheduled: bool
    """Whether the checkpoint is scheduled and therefore has scores."""
    keep_pending_metrics: bool
    """Whether the checkpoint contains the metrics of the steps since the last scheduled report. If
    the run is extended later, its next report includes them, as if the run had never stopped."""
    interrupt: bool
    """Whether to end training because of a signal, once the checkpoint is on disk."""

    @property
    def waits_for_step(self) -> bool:
        """Whether to check the latest step for divergence now instead of `Meter.LAG` steps later.

        A recovery save must not trigger this check, because the step at which a run ends must not
        depend on the clock.
        """
        return self.evaluate or self.interrupt


@dataclass(frozen=True)
class ActionSchedule:
    """The steps at which a run reports, evaluates, saves, and ends."""

    config: TrainConfig
    steps_per_epoch: int

    @property
    def steps_per_checkpoint(self) -> int:
        """The number of steps between scheduled checkpoints."""
        unit = self.steps_per_epoch if self.config.checkpoint_unit == "epoch" else 1
        return self.config.checkpoint_every * unit

    def after(self, step: int, vote: Vote, last_saved: int) -> DueActions:
        """Return the actions due after a step; `last_saved` is the latest checkpoint's step."""
        # The combined vote can be from an earlier step. Ignore a request for a recovery save if a
        # checkpoint has been saved since that step.
        needs_recovery = vote.needs_recovery_save and vote.step > last_saved
        is_last = step == self.config.steps
        is_report_scheduled = step % self.config.log_every == 0
        is_scheduled = step % self.steps_per_checkpoint == 0
        evaluate = is_scheduled or is_last
        save = evaluate or vote.signal != 0 or needs_recovery
        return DueActions(
            report=is_report_scheduled or is_last,
            evaluate=evaluate,
            translate=is_last or step % (self.steps_per_checkpoint * self.config.bleu_every) == 0,
            save=save,
            is_scheduled=is_scheduled,
            keep_pending_metrics=save and not is_report_scheduled,
            interrupt=vote.signal != 0,
        )

    def is_out_of_patience(self, step: int, scores: Mapping[int, float]) -> bool:
        """Return whether the best scheduled checkpoint is at least `patience` checkpoints old.

        `scores` maps the steps of scheduled checkpoints, in increasing order, to scores. Lower
        scores are better. The result is false if `patience` is None or if no checkpoint is
        scheduled at `step`.
        """
        patience = self.config.patience
        if patience is None or step % self.steps_per_checkpoint:
            return False
        # The earliest of several equally good checkpoints counts as the best. At step 0, there are
        # no checkpoints, and `default` sets the age of the best checkpoint to 0.
        best_step = min(scores, key=scores.__getitem__, default=step)
        return step - best_step >= patience * self.steps_per_checkpoint
