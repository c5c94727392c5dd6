"""The life of a run: start or resume, step by step, with reports and checkpoints on the way."""

import contextlib
import dataclasses
import math
import signal
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from transformer_jax.cache import enable_compilation_cache
from transformer_jax.console import shell_command
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.prepare import prepare
from transformer_jax.distributed import heartbeat
from transformer_jax.distributed.preemption import CheckpointTimer, GracefulShutdown
from transformer_jax.distributed.processes import SINGLE_PROCESS, ProcessGroup, StepConsensus
from transformer_jax.errors import (
    DivergedError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    is_out_of_memory,
)
from transformer_jax.inference.evaluate import score
from transformer_jax.inference.perplexity import perplexity, score_sentences
from transformer_jax.inference.translate import Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import abstract_params
from transformer_jax.model.transformer import Params
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.lock import exclusive_lock
from transformer_jax.runs.run_directory import RunDirectory, installed_versions, write_json
from transformer_jax.training.flops import peak_flops
from transformer_jax.training.metric_writer import MetricWriter, NullWriter
from transformer_jax.training.optimizer import learning_rate
from transformer_jax.training.sharding import SHARDINGS, CompiledStep
from transformer_jax.training.step import TrainState, init_state, make_train_step
from transformer_jax.training.throughput import Meter, Sums
from transformer_jax.training.tracing import StepTracer

# Steps in a row without a finite gradient, after which a run ends.
MAX_SKIPPED_STEPS = 10
CURE = "Try a smaller --train.learning-rate-scale or a longer --train.warmup-steps"


def run_training(
    folder: RunDirectory, console: Console, hosts: ProcessGroup = SINGLE_PROCESS
) -> int:
    """Train from the newest checkpoint, or from the start, to the config's last step.

    Args:
        folder: the run.
        console: where the first process tells what it does.
        hosts: the processes that train it together.

    Returns:
        How many scheduled checkpoints the run has, for averaging.

    Raises:
        InterruptedRunError: a signal asked for an end; the run is saved.
        DivergedError: the loss is no number any more.
        OutOfMemoryError: the device has no room.
    """
    enable_compilation_cache()
    go_on = shell_command("resume", folder.path)
    try:
        with GracefulShutdown(f"go on with `{go_on}`") as stop, contextlib.ExitStack() as stack:

            def take() -> None:
                stack.enter_context(exclusive_lock(folder.path))
                folder.store()

            hosts.on_primary(take)
            training = hosts.on_all(lambda: Training(folder, console, hosts))
            return training.run(stop)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        parts = 2 * folder.config.train.gradient_accumulation_steps
        raise OutOfMemoryError(
            f"the device has no room for a step of this model: "
            f"`{go_on} --train.gradient-accumulation-steps {parts}` computes "
            f"each batch in {parts} parts; --model.remat saves memory too"
        ) from error


def checkpoint_metadata(state: TrainState, unreported: Sums) -> dict[str, Any]:
    """Return what a checkpoint keeps of a state beside its arrays."""
    return {
        "versions": installed_versions(),
        "unreported": unreported,
        "skipped": int(state.skipped),
        "skipped_in_a_row": int(state.skipped_in_a_row),
    }


class Training:
    """One process's part in the life of a run."""

    checkpoints: CheckpointManager

    def __init__(
        self, folder: RunDirectory, console: Console, hosts: ProcessGroup = SINGLE_PROCESS
    ) -> None:
        self.folder, self.console, self.hosts = folder, console, hosts
        self.config = config = folder.config
        self.prepared = prepared = prepare(
            config.data,
            folder.vocabulary,
            folder.fingerprint,
            progress=lambda doing, *_: heartbeat.busy(doing),
        )
        self.model = build_transformer(config.model, **prepared.vocabulary.sizes)
        self.batches = prepared.batches(config.data.batch_tokens, config.train.seed)
        unit = self.batches.per_epoch if config.train.checkpoint_unit == "epoch" else 1
        self.interval = config.train.checkpoint_every * unit
        self.placement = SHARDINGS[config.train.parallelism]()
        greedy = dataclasses.replace(config.decode, beam_size=1)
        self.translator = Translator(self.model, prepared.vocabulary, greedy)
        self.recovery = CheckpointTimer(config.train.max_minutes_between_checkpoints)

    def run(self, stop: GracefulShutdown) -> int:
        """Do what `run_training` says."""
        train = self.config.train
        self._introduce()
        # Orbax would lose its way, were it interrupted.
        stop.can_wait = True
        latest = self._open_checkpoints()
        with self.checkpoints:
            state, earlier = self._state(latest)
            stop.check()
            first = self.saved_at = latest or 0
            if first >= train.steps or self._is_out_of_patience(first):
                self.console.print(f"{self.folder.path} is at step {first} already: nothing to do")
                return len(self.checkpoints.scores)
            every = {"train": train.log_every, "dev": self.interval}
            self.hosts.on_primary(lambda: self.folder.truncate_metrics(first, every))
            self.agreement = StepConsensus(self.hosts)
            self.meter = Meter(self.model, peak_flops(self.config.model.dtype), earlier)
            logbook = MetricWriter if self.hosts.is_primary else NullWriter
            # Of several processes one is enough: all do the same.
            profile = StepTracer(
                self.folder.path / "profile",
                after=first + train.log_every,
                steps=train.profile if self.hosts.is_primary else 0,
            )
            with logbook(self.folder, self.console, step=first) as self.log, profile:
                compiled = CompiledStep(
                    make_train_step(self.model, train),
                    self.placement,
                    self.log.say,
                    self.meter.paused,
                )
                for step in range(first + 1, train.steps + 1):
                    batch = self.batches.local_batch(step - 1, self.placement.shard)
                    state, metrics = compiled(state, batch)
                    self._check_skipped(step - 2, self.meter.add(metrics, batch))
                    heartbeat.beat(step)
                    self.log.advance(step)
                    self._after(step, state, stop)
                    profile.after(step, state)
                    if self._is_out_of_patience(step):
                        self.log.say(f"no better perplexity in {train.patience} checkpoints: ended")
                        break
            # What the last one says of its checkpoint, all hear.
            self.hosts.on_all(self.checkpoints.wait)
            return len(self.checkpoints.scores)

    def _is_out_of_patience(self, step: int) -> bool:
        """Tell whether the checkpoints up to this step have long brought no better perplexity."""
        patience = self.config.train.patience
        if patience is None or step % self.interval:
            return False
        scores = self.checkpoints.scores
        best = min(scores, key=lambda step: scores[step], default=step)
        return step - best >= patience * self.interval

    def _after(self, step: int, state: TrainState, stop: GracefulShutdown) -> None:
        """Report, score and save when it is time to, and end where that was asked for."""
        train = self.config.train
        is_last = step == train.steps
        is_scheduled = step % self.interval == 0
        # Read once: a signal that comes while this goes on is for the next step.
        noted = self.agreement.after(step, stop.signal or 0, self._wants_to_save())
        number = noted.signal
        is_due = noted.is_due and noted.step > self.saved_at
        if step % train.log_every == 0 or is_scheduled or is_last or number:
            self._check_skipped(step, int(self.meter.last.skipped_in_a_row))
        # What the last step of all reports off schedule, a run that goes on reports on schedule.
        owed = self.meter.pending_metrics() if is_last and step % train.log_every else None
        if step % train.log_every == 0 or is_last:
            self._report(step)
        if is_scheduled or is_last or number or is_due:
            with self.meter.paused():
                dev = self._score(step, state) if is_scheduled or is_last else None
                arrays = {"params": state.params, "optimizer": state.optimizer}
                self.hosts.on_all(lambda: self.checkpoints.prepare_save(step, arrays))
                self.checkpoints.save(
                    step,
                    arrays,
                    dev if is_scheduled else None,
                    checkpoint_metadata(
                        state, self.meter.pending_metrics() if owed is None else owed
                    ),
                )
                self.recovery.saved()
                self.saved_at = step
        if number and not is_last:
            self.hosts.on_all(self.checkpoints.wait)
            name = signal.Signals(number).name
            raise RunInterrupted(f"{name}: saved at step {step}; {stop.how_to_go_on}")

    def _wants_to_save(self) -> bool:
        """Tell whether it is time for a checkpoint off schedule, by this process's clock."""
        if not self.hosts.is_primary:
            return False
        # What could not be written is told by the attempt to write the next.
        is_idle = not self.checkpoints.is_writing()
        return self.checkpoints.has_failed() or (is_idle and self.recovery.is_due())

    def _check_skipped(self, step: int, in_a_row: int) -> None:
        """End a run of which so many steps, up to this one, were skipped, if these are too many."""
        if in_a_row < MAX_SKIPPED_STEPS:
            return
        path = self.folder.path / "diverged.json"
        pairs = {
            n: self.batches.pairs(n - 1).tolist() for n in range(step - in_a_row + 1, step + 1)
        }
        content = {"about": "training pairs, of those kept, by step", "pairs": pairs}
        self.hosts.on_primary(lambda: write_json(path, content))
        raise DivergedError(
            f"loss or gradient were no finite numbers in {in_a_row} steps in a row, up to "
            f"{step}: {path.name} names the pairs. {CURE}; checkpoints have what was before"
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _introduce(self) -> None:
        devices = self.placement.devices
        processes = f" in {self.hosts.count} processes" if self.hosts.count > 1 else ""
        params = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(self.model)))
        for line in (
            f"device  {devices[0].device_kind} x {len(devices)}{processes}, jax {jax.__version__}",
            f"model   {self.config.model.num_layers}+{self.config.model.num_layers} layers, "
            f"d_model {self.config.model.d_model}, {params:,} parameters",
            f"data    {self.prepared.report['corpus']}: {self.prepared.report['train']['kept']:,} "
            f"pairs, {self.model.vocab_size} pieces",
            f"batches {self.batches.summary}",
        ):
            self._say(line)

    def _open_checkpoints(self) -> int | None:
        """Open them; return the newest good one: the first process finds it, then others look."""

        def begin() -> None:
            self.checkpoints = CheckpointManager(
                self.folder.checkpoints,
                self.folder.identity,
                keep=self.config.train.keep_checkpoints,
                say=self._say,
            )

        def choose() -> int | None:
            begin()
            return self.checkpoints.latest_valid()

        latest = self.hosts.on_primary(choose)
        self.hosts.on_all(lambda: None if self.hosts.is_primary else begin())
        return latest

    def _state(self, latest: int | None) -> tuple[TrainState, Sums]:
        """Return this checkpoint's state, or a fresh one, placed.

        Beside it what that checkpoint had not yet reported.
        """
        if latest is None:
            return self.placement.place_state(init_state(self.model, self.config.train)), []
        shapes = jax.eval_shape(lambda: init_state(self.model, self.config.train))
        parts = {"params": shapes.params, "optimizer": shapes.optimizer}
        found = self.checkpoints.restore(latest, self.placement.abstract_state(parts))
        notes = self.checkpoints.metadata(latest)
        try:
            unreported = [[float(x), float(y), float(z)] for x, y, z in notes["unreported"]]
            counts = {name: jnp.int32(notes[name]) for name in ("skipped", "skipped_in_a_row")}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"checkpoint {latest} is not as we write them: {error!r}") from error
        state = TrainState(jnp.int32(latest), jnp.int32(self.config.train.seed), **found, **counts)
        return self.placement.place_state(state), unreported

    def _report(self, step: int) -> None:
        updates = max(step - int(self.meter.last.skipped), 1)
        values = self.meter.read()
        train = self.config.train
        values["learning_rate"] = float(
            learning_rate(
                updates,
                d_model=self.config.model.d_model,
                warmup_steps=train.warmup_steps,
                scale=train.learning_rate_scale,
            )
        )
        self.log.report(step, "train", values)

    def _score(self, step: int, state: TrainState) -> float:
        """Report scores on the development set; return its perplexity."""
        params = self.placement.to_local_device(state.params)
        # One computes it, so that it is one number whatever the machines.
        return self.hosts.on_primary(lambda: self._score_here(step, params))

    def _score_here(self, step: int, params: Params) -> float:
        self.log.doing("scoring")
        dev = perplexity(score_sentences(self.model, params, *self.prepared.tokens("dev")))
        if not math.isfinite(dev):
            raise DivergedError(
                f"at step {step} the perplexity of the development set is {dev}, and nothing of "
                f"it was saved. {CURE}; {self.folder.checkpoints} has what was before"
            )
        values = {"perplexity": dev}
        is_last = step == self.config.train.steps
        if is_last or step % (self.interval * self.config.train.bleu_every) == 0:
            sources, references = self.prepared.lines("dev")
            found = self.translator.translate(params, sources)
            hypotheses = [best[0].text for best in found]
            scores = score(hypotheses, references, tokenizer=bleu_tokenizer(self.config.data))
            values |= {"bleu": scores.bleu, "exact": scores.exact}
            self.log.sample(step, sources[:20], hypotheses[:20], references[:20])
        self.log.report(step, "dev", values)
        return dev
