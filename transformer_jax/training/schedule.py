"""Decide what is due after each training step, as a pure function of the step and the votes.

Steps count from 1. There are two kinds of checkpoints. A scheduled checkpoint belongs to a fixed
step and carries the perplexity on the development set. All other checkpoints (recovery,
interruption, end of training off schedule) carry no score, so clocks and signals do not affect
which checkpoints are averaged.
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
    """Also translate the development set, to compute its BLEU."""
    save: bool
    """Save a checkpoint."""
    is_scheduled: bool
    """Whether the checkpoint is a scheduled one, which carries its score."""
    keep_pending_metrics: bool
    """Whether the checkpoint carries the metrics since the last scheduled report.

    The last step may report off schedule. If the run is extended later, it reports these metrics
    again at the scheduled step, as if it had never ended.
    """
    interrupt: bool
    """End training because of a signal, after the checkpoint is on disk."""

    @property
    def waits_for_step(self) -> bool:
        """Whether an action waits for the step's result anyway, so that a check is free."""
        return self.report or self.evaluate or self.interrupt


@dataclass(frozen=True)
class Schedule:
    """The steps at which a run reports, evaluates, saves, and ends."""

    steps: int
    """The last step."""
    log_every: int
    """Steps between reports of training metrics."""
    checkpoint_every: int
    """Steps between scheduled checkpoints."""
    bleu_every: int = 1
    """The number of scheduled checkpoints between translations of the development set."""
    patience: int | None = None
    """Training ends after this many scheduled checkpoints without a better perplexity."""

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
            vote: the newest vote that all processes know.
            last_saved: the step of the newest checkpoint.
        """
        has_signal = vote.signal != 0
        # A vote may be a few steps old. A checkpoint saved since then has already fulfilled its
        # request.
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
        """Return whether the last `patience` scheduled checkpoints did not improve the perplexity.

        Args:
            step: the step that has just run.
            scores: the perplexity of each scheduled checkpoint, by step.
        """
        if self.patience is None or step % self.checkpoint_every:
            return False
        best = min(scores, key=lambda step: scores[step], default=step)
        return step - best >= self.patience * self.checkpoint_every
