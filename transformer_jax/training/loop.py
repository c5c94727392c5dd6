"""The training loop: run steps; between steps, report, save, and evaluate.

The loop trains one run, or several runs in one program. A `Member` represents each run and owns the
run's folder, reports, and checkpoints. The loop owns the states and the step.
"""

import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from rich.console import Console

from transformer_jax.backend import count_compilations, standard_settings, start_backend
from transformer_jax.config import Config
from transformer_jax.config.architectures import uses
from transformer_jax.console import shell_command
from transformer_jax.data.batches import Batch
from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.preemption import GracefulShutdown
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup, StepConsensus, Vote
from transformer_jax.errors import RunInterrupted, Setting, memory_errors
from transformer_jax.parallel import map_ahead
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.components import RunComponents
from transformer_jax.training.evaluation import EvaluationStoppedError
from transformer_jax.training.joint import JointStep, Slots
from transformer_jax.training.member import Assignment, Member
from transformer_jax.training.metric_writer import Callback, MetricWriter
from transformer_jax.training.step import TrainStep
from transformer_jax.training.tracing import StepTracer


@standard_settings()
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
            steps, or a score on the development set is not finite.
        OutOfMemoryError: the device does not have enough memory.
        DataError: the text differs from the text that the run started with, or its references
            cannot be scored.
        StorageError: the run cannot be read or written.
        UsageError: another process is already using the run.
        BackendError: JAX cannot start.
    """
    start_backend(folder.cpu_threads)
    hint = f"resume with `{shell_command('resume', folder.path)}`"
    advice = _memory_advice(folder.config, hint)
    with memory_errors(*advice), GracefulShutdown(hint) as shutdown:
        [member] = _train([Assignment(folder, console, callback)], shutdown, group)
    return member.num_scheduled


@standard_settings()
def train_together(assignments: Sequence[Assignment], resume_hint: str) -> None:
    """Train runs that `launch.can_train_together` accepts, in one program on one device.

    Each run trains from its latest checkpoint. If the checkpoints are from different steps, the
    runs that are ahead join later. An error in one run ends only that run, and its `on_end`
    receives the error. A signal or an `OutOfMemoryError` ends all runs.
    """
    start_backend(assignments[0].folder.cpu_threads)
    count = len(assignments)
    folders = [replace(x.folder, group=max(x.folder.group, count)) for x in assignments]
    members = [replace(x, folder=folder) for x, folder in zip(assignments, folders, strict=True)]
    too_large = f"the device does not have enough memory to train {count} runs in one program: use "
    advice = Setting("group", max(1, count // 2))
    with memory_errors(too_large, advice), GracefulShutdown(resume_hint) as shutdown:
        _train(members, shutdown)


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
    assignments: Sequence[Assignment], shutdown: GracefulShutdown, group: ProcessGroup | None = None
) -> list[Member]:
    """Train runs until they have ended; with no `group`, an error ends only the run it concerns."""
    is_alone, group = group is not None, group or SINGLE_PROCESS
    members = [Member(x, group, shutdown, is_alone=is_alone) for x in assignments]
    with count_compilations() as compilations, contextlib.ExitStack() as contexts:
        for member in map(contexts.enter_context, members):
            member.attempt(member.lock)
        group.barrier()
        like: RunComponents | None = None
        for member in members:
            like = member.attempt(member.prepare, like) or like
            member.attempt(member.restore)
        _run_steps([member for member in members if not member.has_ended], group, shutdown)
    if compilations.names:
        for assignment in assignments:
            assignment.console.print(str(compilations))
    return members


def _run_steps(members: Sequence[Member], group: ProcessGroup, shutdown: GracefulShutdown) -> None:
    """Train the members until they have ended, or until a signal arrives."""
    if not members:
        return
    first = min(member.restored for member in members) + 1
    last = max(member.folder.config.train.steps for member in members)
    lead, slots = members[0].run, Slots([member.state for member in members])
    step_of_each = [TrainStep(x.run.model, x.folder.config.train) for x in members]
    step_of_all = JointStep.combine(*step_of_each) if slots.is_joint else step_of_each[0]
    consensus = StepConsensus(group)

    def read(step: int) -> tuple[Batch, Batch]:
        # Batches are numbered from 0, and steps from 1.
        runs = [member.run for member in members]
        batch = slots.join([x.batches.local_batch(step - 1, x.sharding.shard) for x in runs])
        return batch, lead.sharding.place_batch(batch)

    steps = range(first, last + 1)
    with (
        CompiledStep(step_of_all, lead.sharding, slots.num_runs) as train_step,
        contextlib.closing(map_ahead(read, steps)) as batches,
        _make_tracer(lead, members[0].writer, restored=first - 1) as tracer,
    ):
        for step, (batch, placed) in zip(steps, batches, strict=True):
            for slot, member in enumerate(members):
                if member.restored == step - 1:
                    # Exclude the time in which other runs were restored or performed earlier steps.
                    member.meter.start_clock()
                    if step > first:
                        slots.write(slot, member.state)
                    # The slot contains a copy, so release the device's memory.
                    del member.state
            if all(member.has_ended for member in members):
                break
            numbered = enumerate(members)
            active = {i: x for i, x in numbered if not x.has_ended and x.restored < step}
            if not active:
                continue
            if not train_step.is_compiled_for(batch):
                with _paused(active.values()):
                    heartbeat.busy("compiling")
                    upcoming = lead.batches.upcoming(step - 1, last)
                    _say(active.values(), train_step.compile(slots.states, batch, upcoming))
            for message in train_step.take_finished():
                _say(active.values(), message)
            slots.states, metrics = train_step(slots.states, batch, placed)
            for slot, one in enumerate(slots.split(metrics)):
                if slot in active:
                    active[slot].attempt(active[slot].record, step, one, len(active))
            heartbeat.beat(step)
            # Read `shutdown.signal` only once per step. If a signal arrives later, the next step
            # handles it.
            vote = consensus.vote(step, shutdown.signal or 0, _needs_recovery_save(active.values()))
            _report_and_save(step, vote, active, slots, train_step, shutdown)
            tracer.after_step(step, slots.states)


def _report_and_save(
    step: int,
    vote: Vote,
    active: Mapping[int, Member],
    slots: Slots,
    train_step: CompiledStep,
    shutdown: GracefulShutdown,
) -> None:
    """Perform the actions that are due after a step. All members save before the evaluations."""
    saving = {}
    for slot, member in active.items():
        reported = member.attempt(member.report, step, vote)
        if reported is not None and reported[0].save:
            saving[slot] = member, *reported
    if saving:
        with _paused(active.values()):
            heartbeat.busy("evaluating or saving")
            for slot, (member, due, pending) in saving.items():
                member.attempt(member.save, step, due, pending, slots.read(slot))
            if any(due.interrupt for _, due, _ in saving.values()):
                _interrupt(step, vote.signal, active.values(), train_step, shutdown)
            try:
                for slot, (member, due, _) in saving.items():
                    if due.evaluate:
                        member.attempt(member.score, due, slots.read(slot))
            except EvaluationStoppedError as stopped:
                _interrupt(step, stopped.number, active.values(), train_step, shutdown)
    for member in active.values():
        member.attempt(member.end_if_complete, step)


def _interrupt(
    step: int,
    number: int,
    members: Iterable[Member],
    train_step: CompiledStep,
    shutdown: GracefulShutdown,
) -> NoReturn:
    """Wait for this step's checkpoints, and end all runs because a signal arrived."""
    for member in members:
        member.attempt(member.checkpointer.wait)
    if train_step.is_compiling_ahead():
        _say(members, f"saved at step {step}; waiting for a compilation to finish")
    name = signal.Signals(number).name
    raise RunInterrupted(f"{name}: saved at step {step}; {shutdown.resume_hint}")


def _needs_recovery_save(members: Iterable[Member]) -> bool:
    # All members save at the same steps, so that they can resume together.
    return any(x.checkpointer.needs_recovery_save() for x in members if not x.has_ended)


@contextlib.contextmanager
def _paused(members: Iterable[Member]) -> Iterator[None]:
    """Exclude the time spent in this context from the rates of all members."""
    with contextlib.ExitStack() as pauses:
        for member in members:
            pauses.enter_context(member.meter.paused())
        yield


def _say(members: Iterable[Member], text: str) -> None:
    for member in members:
        member.writer.say(text)


def _make_tracer(run: RunComponents, writer: MetricWriter, restored: int) -> StepTracer:
    # All processes run the same program, so tracing one of them is enough.
    train = run.folder.config.train
    num_steps = train.profile if run.group.is_primary else 0
    after = restored + train.log_every
    if num_steps and after >= train.steps:
        writer.say(f"note: no steps are traced, because tracing would start after step {after}")
        num_steps = 0
    return StepTracer(run.folder.path / "profile", after=after, steps=num_steps)
