"""One run in the training loop: its lock, checkpoints, reports, and scores."""

import contextlib
import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import ArrayLike
from rich.console import Console

from transformer_jax.backend import host_device
from transformer_jax.config import TrainConfig
from transformer_jax.distributed.preemption import GracefulShutdown
from transformer_jax.distributed.processes import ProcessGroup, Vote
from transformer_jax.errors import (
    DivergedError,
    OutOfMemoryError,
    RunInterrupted,
    TransformerJaxError,
)
from transformer_jax.files import write_json
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.runs.metrics_file import truncate_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.actions import DueActions
from transformer_jax.training.checkpointing import Checkpointer
from transformer_jax.training.components import RunComponents, build_run_components
from transformer_jax.training.evaluation import (
    DIVERGENCE_ADVICE,
    DevEvaluator,
    EvaluationStoppedError,
)
from transformer_jax.training.flops import peak_flops
from transformer_jax.training.meter import Meter, Sums
from transformer_jax.training.metric_writer import Callback, MetricWriter, NullWriter
from transformer_jax.training.schedule import learning_rate_schedule
from transformer_jax.training.step import StepMetrics, TrainState

# A run ends after this many consecutive steps with a non-finite loss or gradient.
MAX_SKIPPED_STEPS = 10
NO_VOTE = Vote(0, 0, False)

T = TypeVar("T")
Parameters = ParamSpec("Parameters")

OnEnd = Callable[[TransformerJaxError | None], object]
"""A function that is called when a run has ended, with the error that ended it or None."""


@dataclass(frozen=True)
class Assignment:
    """A run to train, and the recipients of its progress and reports."""

    folder: RunFolder
    console: Console
    """Shows progress. The console must be quiet in all processes except the primary one."""
    callback: Callback | None = None
    """Receives each report in the primary process."""
    on_end: OnEnd = lambda _: None


class Member(contextlib.ExitStack):
    """A run that the training loop trains, alone or together with others in one program.

    On exit, this context manager waits until a checkpoint is written, and releases the run's lock.
    """

    def __init__(
        self,
        assignment: Assignment,
        group: ProcessGroup,
        shutdown: GracefulShutdown,
        *,
        is_alone: bool,
    ) -> None:
        """Store the arguments. Unless `is_alone` is true, other runs may share the device."""
        super().__init__()
        self.folder, self._console = assignment.folder, assignment.console
        self._callback, self._on_end = assignment.callback, assignment.on_end
        self._group, self._shutdown, self._is_alone = group, shutdown, is_alone
        # The steps whose reports are due but not written yet.
        self._due_reports: list[int] = []
        self.has_ended = False
        self.num_scheduled = 0
        """The number of scheduled checkpoints on disk once the run has ended."""

    def attempt(
        self, action: Callable[Parameters, T], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> T | None:
        """Unless the run has ended, call a method of the run, and return its result.

        If the loop also trains other runs, an error ends only this run. However, this method always
        raises an OutOfMemoryError again, so that the caller can train fewer runs in one program.
        """
        if self.has_ended:
            return None
        try:
            return action(*args, **kwargs)
        except TransformerJaxError as error:
            if self._is_alone or isinstance(error, OutOfMemoryError):
                raise
            self.has_ended = True
            # The first error is more informative than an error that occurs during closing.
            with contextlib.suppress(TransformerJaxError):
                self.__exit__(type(error), error, error.__traceback__)
            self._on_end(error)
            return None

    def lock(self) -> None:
        """Lock the run until it ends, and write its config."""
        if self._group.is_primary:
            self.enter_context(exclusive_lock(self.folder.path))
            self.folder.store()

    def prepare(self, like: RunComponents | None) -> RunComponents:
        """Build and return the run's components. If `like` is another run, reuse its components."""
        # Several runs in one program use one device.
        devices = None if self._is_alone else jax.devices()[:1]
        self.run = build_run_components(self.folder, self._group, like=like, devices=devices)
        return self.run

    def restore(self) -> None:
        """Restore the latest checkpoint. End the run if it is already complete."""
        run, config, schedule = self.run, self.folder.config, self.run.schedule
        self._console.print("\n".join(run.summary()))
        # From here on, defer signals, because an exception in Orbax would corrupt Orbax's state.
        self._shutdown.defers_signals = True
        self.checkpointer = self.enter_context(Checkpointer(run))
        manager = self.checkpointer.manager
        self.state, pending = self.checkpointer.restore()
        self._shutdown.check()
        self.restored = restored = self.checkpointer.last_step
        is_done = restored >= config.train.steps
        is_unscored = self.checkpointer.unscored is not None
        has_ended = is_done or schedule.is_out_of_patience(restored, manager.scores)
        if has_ended and not is_unscored:
            stopping = f" (early stopping: train.patience is {config.train.patience})"
            message = f"{self.folder.path} is already at step {restored}: nothing to do"
            self._console.print(message if is_done else message + stopping)
            self._end()
            return
        if self._group.is_primary:
            # Remove the reports that the resumed run writes again. At the restored step, a training
            # report is final if no metrics are pending, and an evaluation is final if the
            # checkpoint has a score.
            is_final = {"train": not pending, "dev": restored in manager.perplexities}
            kept = {split for split, final in is_final.items() if final}
            truncate_metrics(self.folder.metrics, restored, kept)
        self._group.barrier()
        # FLOPs can be recomputed from the steps, so checkpoints do not store them.
        pending_steps = range(restored - len(pending) + 1, restored + 1)
        pending_flops = sum(map(run.step_flops, pending_steps))
        peak = self._group.count * peak_flops(config.model.dtype)
        self.meter = Meter(peak, pending, pending_flops, self.checkpointer.unscored)
        writer_type = MetricWriter if self._group.is_primary else NullWriter
        writer = writer_type(self.folder, self._console, self._callback, step=restored)
        self.writer: MetricWriter = self.enter_context(writer)
        self._evaluator = DevEvaluator(run, writer, self._shutdown)
        if is_unscored:
            self._score_restored()
            self.end_if_complete(restored)

    def _score_restored(self) -> None:
        """Score the restored checkpoint, because an interruption ended its evaluation."""
        try:
            due = self.run.schedule.after(self.restored, NO_VOTE, self.restored)
            self.score(due, self.state)
        except EvaluationStoppedError as stopped:
            name = signal.Signals(stopped.number).name
            hint = self._shutdown.resume_hint
            raise RunInterrupted(f"{name}: saved at step {self.restored}; {hint}") from stopped

    def save(self, step: int, due: DueActions, pending: Sums, state: TrainState) -> None:
        """Start writing a checkpoint. If the step is due for evaluation, call `score` next."""
        unscored = self.meter.last() if due.evaluate else None
        num_earlier = self.writer.count_earlier(step)
        self.checkpointer.save(step, state, pending, unscored, num_earlier)

    def record(self, step: int, metrics: StepMetrics, num_runs: int) -> None:
        """Record a step that has started; check and report an earlier step that has finished.

        The step trains `num_runs` runs.
        """
        self.meter.add(metrics, self.run.step_flops(step), num_runs)
        num_skipped = self.meter.wait_for_earlier_step()
        self._check_divergence(step - self.meter.LAG, num_skipped)
        self._write_due_reports(step, self.meter.LAG)
        self.writer.advance(step)

    def report(self, step: int, vote: Vote) -> tuple[DueActions, Sums]:
        """Note whether a report is due; return the due actions and the metrics to save.

        `record` writes the report `Meter.LAG` steps later, so that the devices do not wait for the
        host. If a checkpoint is due, this method writes all due reports, because a run that resumes
        from the checkpoint does not write them.
        """
        due = self.run.schedule.after(step, vote, self.checkpointer.last_step)
        if due.save:
            self._write_due_reports(step)
        if due.waits_for_step:
            self._check_divergence(step, int(self.meter.last().skipped_in_a_row))
        # Copy the pending metrics before the report resets the meter.
        pending = self.meter.pending_metrics() if due.keep_pending_metrics else []
        if due.report:
            self._due_reports.append(step)
        if due.save:
            self._write_due_reports(step)
        return due, pending

    def _write_due_reports(self, step: int, lag: int = 0) -> None:
        """Write the due reports of steps up to `step` - `lag`, where `step` is the latest step."""
        while self._due_reports and self._due_reports[0] <= step - lag:
            due = self._due_reports.pop(0)
            self._check_divergence(due, int(self.meter.last(step - due).skipped_in_a_row))
            self._write_report(due, step - due)

    def score(self, due: DueActions, state: TrainState) -> None:
        """Evaluate the latest checkpoint, whose state is `state`, and record its score."""
        try:
            scores = self._evaluator.evaluate(
                state, self.checkpointer.last_step, translate=due.translate
            )
        except DivergedError:
            self.checkpointer.manager.discard(self.checkpointer.last_step)
            raise
        # Only scheduled checkpoints have a score (see `actions`).
        self.checkpointer.record_score(scores if due.is_scheduled else None)

    def end_if_complete(self, step: int) -> None:
        """End the run after its last step, or if its score no longer improves."""
        train = self.folder.config.train
        if self.run.schedule.is_out_of_patience(step, self.checkpointer.manager.scores):
            name = train.patience_metric.replace("_", " ")
            self.writer.say(
                f"early stopping: {name} has not improved for {train.patience} checkpoints"
            )
        elif step < train.steps:
            return
        if self.meter.pending_metrics():
            # Early stopping ended training between two reports, so write a last report.
            self._write_report(step)
        self.checkpointer.wait()
        self._end()

    def _end(self) -> None:
        self.num_scheduled = len(self.checkpointer.manager.perplexities)
        self.has_ended = True
        self.close()
        self._on_end(None)

    def _write_report(self, step: int, num_later: int = 0) -> None:
        """Report the learning rate and metrics; `num_later` steps have started after this step."""
        config = self.folder.config
        # Skipped steps do not count as updates.
        num_updates = max(step - int(self.meter.last(num_later).skipped), 1)
        # On an accelerator, this computation would wait for the steps that have started.
        with jax.default_device(host_device()):
            rate = _learning_rate(config.train, config.model.d_model, np.int32(num_updates))
        values = self.meter.read(num_later) | {"learning_rate": float(rate)}
        self.writer.report(step, "train", values)

    def _check_divergence(self, step: int, num_skipped: int) -> None:
        """Raise `DivergedError` if `MAX_SKIPPED_STEPS` or more consecutive steps were skipped.

        `num_skipped` counts the consecutive skipped steps up to and including `step`. The file
        diverged.json lists the training pairs in the skipped steps.
        """
        if num_skipped < MAX_SKIPPED_STEPS:
            return
        path = self.folder.path / "diverged.json"
        if self._group.is_primary:
            skipped = range(step - num_skipped + 1, step + 1)
            pairs = {n: self.run.batches.pairs(n - 1).tolist() for n in skipped}
            about = "indices of training pairs (after filtering), by step"
            write_json(path, {"about": about, "pairs": pairs})
        self._group.barrier()
        raise DivergedError(
            f"loss or gradient was not finite in {num_skipped} consecutive steps, up to step "
            f"{step}; {path.name} lists their training pairs; earlier checkpoints are intact. "
            f"{DIVERGENCE_ADVICE}"
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _learning_rate(config: TrainConfig, d_model: int, step: ArrayLike) -> jax.Array:
    return learning_rate_schedule(config, d_model)(step)
