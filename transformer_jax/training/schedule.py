"""What is due after each training step: a pure function of the step and the votes.

Steps count from 1. Checkpoints of two kinds exist. A scheduled checkpoint belongs to a fixed step
and carries the perplexity on the development set. All other checkpoints (recovery, interruption,
end of training off schedule) carry no score, so that no clock and no signal changes which
checkpoints are averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transformer_jax.config import TrainConfig
from transformer_jax.distributed.processes import Vote


class DueActions(NamedTuple):
    """What to do after a step, in this order."""

    report: bool
    """Report the training metrics since the last report."""
    evaluate: bool
    """Compute the perplexity on the development set."""
    translate: bool
    """Translate the development set too, for its BLEU."""
    save: bool
    """Save a checkpoint."""
    is_scheduled: bool
    """Whether the checkpoint is a scheduled one, which carries its score."""
    keep_pending_metrics: bool
    """Whether the checkpoint carries the metrics since the last scheduled report.

    The last step reports off schedule. A run that is extended later reports these metrics again,
    at the scheduled step, as if it had never ended.
    """
    interrupt: bool
    """End training because of a signal, after the checkpoint is on disk."""

    @property
    def waits_for_step(self) -> bool:
        """Whether an action needs the step's result now, so that checking it costs nothing."""
        return self.report or self.evaluate or self.interrupt


@dataclass(frozen=True)
class Schedule:
    """When a run reports, evaluates, saves, and ends."""

    steps: int
    """The last step."""
    log_every: int
    """Steps between reports of training metrics."""
    checkpoint_every: int
    """Steps between scheduled checkpoints."""
    bleu_every: int = 1
    """Scheduled checkpoints between translations of the development set."""
    patience: int | None = None
    """Scheduled checkpoints without a better perplexity after which training ends."""

    @classmethod
    def from_config(cls, config: TrainConfig, steps_per_epoch: int) -> "Schedule":
        """Return the schedule of a config, with epochs converted to steps."""
        unit = steps_per_epoch if config.checkpoint_unit == "epoch" else 1
        return cls(
            steps=config.steps,
            log_every=config.log_every,
            checkpoint_every=config.checkpoint_every * unit,
            bleu_every=config.bleu_every,
            patience=config.patience,
        )

    def after(self, step: int, vote: Vote, last_saved: int) -> DueActions:
        """Return what is due after a step.

        Args:
            step: the step that has just run.
            vote: the signal and the request for a recovery checkpoint that all processes know.
            last_saved: the step of the newest checkpoint.
        """
        has_signal = vote.signal != 0
        # A vote is a few steps old. A checkpoint since then has already met its request.
        needs_recovery = vote.is_due and vote.step > last_saved
        is_last = step == self.steps
        is_report_scheduled = step % self.log_every == 0
        is_scheduled = step % self.checkpoint_every == 0
        evaluate = is_scheduled or is_last
        save = evaluate or has_signal or needs_recovery
        return DueActions(
            report=is_report_scheduled or is_last,
            evaluate=evaluate,
            translate=is_last or step % (self.checkpoint_every * self.bleu_every) == 0,
            save=save,
            is_scheduled=is_scheduled,
            keep_pending_metrics=save and not is_report_scheduled,
            interrupt=has_signal and not is_last,
        )

    def is_out_of_patience(self, step: int, scores: Mapping[int, float]) -> bool:
        """Return whether the last `patience` scheduled checkpoints brought no better perplexity.

        Args:
            step: the step that has just run.
            scores: the perplexity of each scheduled checkpoint, by step.
        """
        if self.patience is None or step % self.checkpoint_every:
            return False
        best = min(scores, key=lambda step: scores[step], default=step)
        return step - best >= self.patience * self.checkpoint_every
