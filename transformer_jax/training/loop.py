"""The training loop: run steps; between steps, report, evaluate, and save."""

import contextlib
import functools
import signal
from dataclasses import dataclass
from typing import NoReturn

import jax
import numpy as np
from jaxtyping import ArrayLike
from rich.console import Console

from transformer_jax.backend import count_compilations, start_backend
from transformer_jax.config import Config, TrainConfig
from transformer_jax.config.architectures import uses
from transformer_jax.console import shell_command
from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.preemption import GracefulShutdown
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup, StepConsensus, Vote
from transformer_jax.errors import DivergedError, RunInterrupted, Setting, memory_errors
from transformer_jax.files import write_json
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.runs.metrics_file import truncate_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.actions import DueActions
from transformer_jax.training.checkpointing import Checkpointer
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.components import RunComponents, build_run_components
from transformer_jax.training.evaluation import (
    DIVERGENCE_ADVICE,
    DevEvaluator,
    EvaluationStoppedError,
)
from transformer_jax.training.flops import peak_flops
from transformer_jax.training.meter import Meter
from transformer_jax.training.metric_writer import Callback, MetricWriter, NullWriter
from transformer_jax.training.schedule import learning_rate_schedule
from transformer_jax.training.step import TrainState, TrainStep
from transformer_jax.training.tracing import StepTracer

# A run ends after this many consecutive steps with a non-finite loss or gradient.
MAX_SKIPPED_STEPS = 10
NO_VOTE = Vote(0, 0, False)


def run_training(
    folder: RunFolder,
    console: Console,
    group: ProcessGroup = SINGLE_PROCESS,
    callback: Callback | None = None,
) -> int:
    """Train from the latest checkpoint, or from the start, to the config's last step.

    Returns the number of scheduled checkpoints on disk, all of which can be averaged. The console
    shows progress; it must be quiet in all processes except the primary one. In the primary
    process, `callback` receives each report.

    Raises:
        RunInterrupted: a signal ended the run. If training had started, its state has been saved.
        DivergedError: the loss or gradient was not finite in `MAX_SKIPPED_STEPS` consecutive
            steps, or the perplexity on the development set is not finite.
        OutOfMemoryError: the device does not have enough memory.
        DataError: the text differs from the text that the run started with, or its references
            cannot be scored.
        StorageError: the run cannot be read or written.
        UsageError: another process is already using the run.
        BackendError: JAX cannot start.
    """
    start_backend(folder.cpu_threads)
    resume_hint = f"resume with `{shell_command('resume', folder.path)}`"
    lock = exclusive_lock(folder.path) if group.is_primary else contextlib.nullcontext()
    advice = _memory_advice(folder.config, resume_hint)
    with memory_errors(*advice), GracefulShutdown(resume_hint) as shutdown, lock:
        if group.is_primary:
            folder.store()
        group.barrier()
        run = build_run_components(folder, group)
        console.print("\n".join(run.summary()))
        with count_compilations() as compilations:
            num_scheduled = _train(run, console, shutdown, callback)
        if compilations.names:
            console.print(str(compilations))
        return num_scheduled


def _memory_advice(config: Config, resume_hint: str) -> list[str | Setting]:
    """Return a message that suggests how to reduce the memory that a training step needs."""
    num_parts = 2 * config.train.gradient_accumulation_steps
    parts: list[str | Setting] = [
        f"the device does not have enough memory for a training step; {resume_hint} and ",
        Setting("train.gradient_accumulation_steps", num_parts),
        f" to compute each batch in {num_parts} parts",
    ]
    if uses(config.model, "remat") and not config.model.remat:
        parts += [", or with ", Setting("model.remat", True), " to store fewer activations"]
    return parts


def _train(
    run: RunComponents,
    console: Console,
    shutdown: GracefulShutdown,
    callback: Callback | None,
) -> int:
    """Restore the state, train, and return the number of scheduled checkpoints on disk."""
    config, schedule = run.folder.config, run.schedule
    # From here on, defer signals, because an exception in Orbax would corrupt Orbax's state.
    shutdown.defers_signals = True
    with Checkpointer(run) as checkpointer:
        state, pending = checkpointer.restore()
        shutdown.check()
        restored = checkpointer.last_step
        is_done = restored >= config.train.steps
        has_ended = is_done or schedule.is_out_of_patience(restored, checkpointer.scores)
        if has_ended and checkpointer.unscored is None:
            reason = (
                "" if is_done else f" (early stopping: train.patience is {config.train.patience})"
            )
            console.print(f"{run.folder.path} is already at step {restored}: nothing to do{reason}")
            return len(checkpointer.perplexities)
        if run.group.is_primary:
            # Remove the reports that the resumed run writes again. At the restored step, a training
            # report is final if no metrics are pending, and an evaluation is final if the
            # checkpoint has a score.
            is_final = {"train": not pending, "dev": restored in checkpointer.perplexities}
            kept = {split for split, final in is_final.items() if final}
            truncate_metrics(run.folder.metrics, restored, kept)
        run.group.barrier()
        # FLOPs can be recomputed from the steps, so checkpoints do not store them.
        pending_steps = range(restored - len(pending) + 1, restored + 1)
        pending_flops = sum(map(run.step_flops, pending_steps))
        peak = run.group.count * peak_flops(config.model.dtype)
        meter = Meter(peak, pending, pending_flops, checkpointer.unscored)
        writer_type = MetricWriter if run.group.is_primary else NullWriter
        with writer_type(run.folder, console, callback, step=restored) as writer:
            _run_steps(run, state, meter, checkpointer, writer, shutdown)
            if meter.pending_metrics():
                # Early stopping ended training between two reports, so write a last report.
                step = checkpointer.last_step
                writer.report(step, "train", _read_metrics(meter, config, step))
        checkpointer.wait()
        return len(checkpointer.perplexities)


def _run_steps(
    run: RunComponents,
    state: TrainState,
    meter: Meter,
    checkpointer: Checkpointer,
    writer: MetricWriter,
    shutdown: GracefulShutdown,
) -> None:
    """Train from the latest checkpoint until the schedule or a signal ends the run."""
    config, schedule, restored = run.folder.config, run.schedule, checkpointer.last_step
    checkpoints = _Checkpoints(run, checkpointer, writer, shutdown)
    consensus = StepConsensus(run.group)
    if checkpointer.unscored is not None:
        with meter.paused():
            checkpoints.score(schedule.after(restored, NO_VOTE, restored), state)
        if checkpoints.are_out_of_patience():
            return
    with (
        CompiledStep(TrainStep(run.model, config.train), run.sharding) as train_step,
        _make_tracer(run, writer, after=restored + config.train.log_every) as tracer,
    ):
        for step in range(restored + 1, config.train.steps + 1):
            # Batches are numbered from 0, and steps from 1.
            batch = run.batches.local_batch(step - 1, run.sharding.shard)
            if not train_step.is_compiled_for(batch):
                with meter.paused():
                    heartbeat.busy("compiling")
                    writer.say(train_step.compile(state, batch))
                train_step.compile_ahead(state, run.batches.upcoming(step, config.train.steps))
            for message in train_step.take_finished():
                writer.say(message)
            state, metrics = train_step(state, batch)
            meter.add(metrics, run.step_flops(step))
            # The host runs ahead of the devices, so check an earlier step, which has finished.
            num_skipped = meter.wait_for_earlier_step()
            _check_divergence(run, step - meter.LAG, num_skipped)
            heartbeat.beat(step)
            writer.advance(step)
            # Read `shutdown.signal` only once per step. If a signal arrives later, the next step
            # handles it.
            vote = consensus.vote(step, shutdown.signal or 0, checkpointer.needs_recovery_save())
            due = schedule.after(step, vote, checkpointer.last_step)
            if due.waits_for_step:
                _check_divergence(run, step, int(meter.last.skipped_in_a_row))
            # Copy the pending metrics before the report resets the meter.
            pending = meter.pending_metrics() if due.keep_pending_metrics else []
            if due.report:
                writer.report(step, "train", _read_metrics(meter, config, step))
            if due.save:
                unscored = meter.last if due.evaluate else None
                with meter.paused():
                    heartbeat.busy("evaluating or saving")
                    checkpointer.save(step, state, pending, unscored)
                    if due.interrupt:
                        checkpoints.interrupt(vote.signal, train_step)
                    if due.evaluate:
                        checkpoints.score(due, state, train_step)
            tracer.after_step(step, state)
            if checkpoints.are_out_of_patience():
                break


@dataclass
class _Checkpoints:
    """The checkpoints of a run, and what their scores and signals lead to."""

    run: RunComponents
    checkpointer: Checkpointer
    writer: MetricWriter
    shutdown: GracefulShutdown

    def __post_init__(self) -> None:
        self._evaluator = DevEvaluator(self.run, self.writer, self.shutdown)

    def score(
        self, due: DueActions, state: TrainState, train_step: CompiledStep | None = None
    ) -> None:
        """Evaluate the latest checkpoint, whose state is `state`, and record its score."""
        step = self.checkpointer.last_step
        try:
            scores = self._evaluator.evaluate(state, step, translate=due.translate)
        except EvaluationStoppedError as stopped:
            self.interrupt(stopped.number, train_step)
        except DivergedError:
            self.checkpointer.discard()
            raise
        # Only scheduled checkpoints have a score (see `actions`).
        self.checkpointer.record_score(scores if due.is_scheduled else None)

    def interrupt(self, number: int, train_step: CompiledStep | None) -> NoReturn:
        """Wait for the latest checkpoint, and end the run because of a signal."""
        step = self.checkpointer.last_step
        self.checkpointer.wait()
        if train_step is not None and train_step.is_compiling_ahead():
            self.writer.say(f"saved at step {step}; waiting for a compilation to finish")
        name = signal.Signals(number).name
        raise RunInterrupted(f"{name}: saved at step {step}; {self.shutdown.resume_hint}")

    def are_out_of_patience(self) -> bool:
        """Return whether training ends at the latest checkpoint, and say so."""
        train, step = self.run.folder.config.train, self.checkpointer.last_step
        is_out = self.run.schedule.is_out_of_patience(step, self.checkpointer.scores)
        if is_out:
            name = train.patience_metric.replace("_", " ")
            self.writer.say(
                f"early stopping: {name} has not improved for {train.patience} checkpoints"
            )
        return is_out


def _read_metrics(meter: Meter, config: Config, step: int) -> dict[str, float]:
    """Return the latest learning rate and the metrics since the last report; reset the meter."""
    # Skipped steps do not count as updates.
    num_updates = max(step - int(meter.last.skipped), 1)
    rate = _learning_rate(config.train, config.model.d_model, np.int32(num_updates))
    return meter.read() | {"learning_rate": float(rate)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _learning_rate(config: TrainConfig, d_model: int, step: ArrayLike) -> jax.Array:
    return learning_rate_schedule(config, d_model)(step)


def _make_tracer(run: RunComponents, writer: MetricWriter, after: int) -> StepTracer:
    # All processes run the same program, so tracing one of them is enough.
    train = run.folder.config.train
    num_steps = train.profile if run.group.is_primary else 0
    if num_steps and after >= train.steps:
        writer.say(f"note: no steps are traced, because tracing would start after step {after}")
        num_steps = 0
    return StepTracer(run.folder.path / "profile", after=after, steps=num_steps)


def _check_divergence(run: RunComponents, step: int, num_skipped: int) -> None:
    """Raise `DivergedError` if `MAX_SKIPPED_STEPS` or more consecutive steps were skipped.

    `num_skipped` counts the consecutive skipped steps up to and including `step`. The file
    diverged.json lists the training pairs of the skipped steps.
    """
    if num_skipped < MAX_SKIPPED_STEPS:
        return
    path = run.folder.path / "diverged.json"
    if run.group.is_primary:
        skipped = range(step - num_skipped + 1, step + 1)
        pairs = {n: run.batches.pairs(n - 1).tolist() for n in skipped}
        write_json(
            path, {"about": "indices of training pairs (after filtering), by step", "pairs": pairs}
        )
    run.group.barrier()
    raise DivergedError(
        f"loss or gradient was not finite in {num_skipped} consecutive steps, up to step {step}; "
        f"{path.name} lists their training pairs; earlier checkpoints are intact. "
        f"{DIVERGENCE_ADVICE}"
    )
