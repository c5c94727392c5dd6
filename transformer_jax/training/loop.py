"""The life of a run: start or resume, step by step, with reports and checkpoints on the way."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from transformer_jax.cache import keep_compiled_programs
from transformer_jax.config import MAX_EXTRA_LENGTH, Config
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.data.encode import SIDES, Progress, say_nothing
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.errors import (
    DataError,
    DivergedError,
    InterruptedRunError,
    LostProcessError,
    OutOfMemoryError,
    StorageError,
    UsageError,
    is_lost_peer,
    is_out_of_memory,
)
from transformer_jax.inference.evaluate import perplexity, score
from transformer_jax.inference.run import Run, load
from transformer_jax.inference.translate import Translator
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.runs.checkpoint import Checkpoints
from transformer_jax.runs.folder import RunFolder, check_free, write_json
from transformer_jax.runs.lock import only_trainer
from transformer_jax.training import heartbeat
from transformer_jax.training.flops import peak_flops
from transformer_jax.training.interruption import RecoveryClock, StopRequest
from transformer_jax.training.logbook import Logbook
from transformer_jax.training.meter import Meter, Sums
from transformer_jax.training.optimizer import learning_rate
from transformer_jax.training.placement import PLACEMENTS, CompiledStep
from transformer_jax.training.step import TrainState, init_state, make_train_step

# Steps in a row without a finite gradient, after which a run ends.
MOST_SKIPPED = 10
CURE = "Try a smaller --train.rate-factor or a longer --train.warmup-steps"


def start(
    config: Config,
    path: Path,
    console: Console,
    *,
    init_from: Path | None = None,
    progress: Progress = say_nothing,
) -> RunFolder:
    """Prepare the text and make the folder of a new run.

    Args:
        config: the experiment.
        path: where the folder shall be.
        console: where notes go.
        init_from: a run whose newest parameters, and vocabulary, this one begins with.
        progress: told of the preparation.

    Raises:
        UsageError: the folder is taken, or the other run has parameters of other shapes.
        DataError: the text cannot be used.
    """
    check_free(path)

    def tell(doing: str, done: int, total: int) -> None:
        heartbeat.busy(doing)
        progress(doing, done, total)

    other = None if init_from is None else load(init_from, average=1)
    vocabulary = None if other is None else other.vocabulary
    prepared = prepare(config.data, vocabulary, progress=tell)
    sizes = prepared.vocabulary.sizes
    for key, pieces in zip(("vocab_size", "source_vocab_size"), sizes, strict=True):
        asked = getattr(config.data, key)
        if pieces != asked:
            console.print(f"note: data.{key} is {pieces}, not {asked}")
            config = config.change(data={key: pieces})
    _check_lengths(config, prepared)
    model = Transformer(config.model, *sizes)
    if other is not None:
        _check_same_shapes(abstract_params(model), abstract_params(other.model), other)

    def begin(folder: RunFolder) -> None:
        if other is not None:
            state = init_state(model, config.train)
            with Checkpoints(folder.checkpoints, folder.identity, keep=1) as checkpoints:
                arrays = {"params": other.params, "optimizer": state.optimizer}
                checkpoints.save(0, arrays, None, notes_of(state, []))

    return RunFolder.create(path, config, prepared.vocabulary, prepared.fingerprint, begin)


def run_training(folder: RunFolder, console: Console) -> int:
    """Train from the newest checkpoint, or from the start, to the config's last step.

    Returns:
        How many scheduled checkpoints the run has, for averaging.

    Raises:
        InterruptedRunError: a signal asked for an end; the run is saved.
        DivergedError: the loss is no number any more.
        OutOfMemoryError: the device has no room.
        LostProcessError: another process of the run is gone.
    """
    keep_compiled_programs()
    how_to_go_on = f"go on with `transformer-jax resume {folder.path}`"
    try:
        with StopRequest(how_to_go_on) as stop, only_trainer(folder.path):
            folder.store()
            return Training(folder, console).run(stop)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # On CPUs a lost connection is a ValueError.
        if jax.process_count() > 1 and is_lost_peer(error):
            heartbeat.lose_peers()
            raise LostProcessError(
                f"another process of this run is gone ({str(error).splitlines()[0]}); "
                f"{how_to_go_on}"
            ) from error
        if not is_out_of_memory(error):
            raise
        parts = 2 * folder.config.train.micro_batches
        raise OutOfMemoryError(
            f"the device has no room for a step of this model: "
            f"`transformer-jax resume {folder.path} --train.micro-batches {parts}` computes "
            f"each batch in {parts} parts; --model.remat saves memory too"
        ) from error


def notes_of(state: TrainState, unreported: Sums) -> dict[str, Any]:
    """Return what a checkpoint keeps of a state beside its arrays."""
    return {
        "unreported": unreported,
        "skipped": int(state.skipped),
        "skipped_in_a_row": int(state.skipped_in_a_row),
    }


class Training:
    """One process's part in the life of a run."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self.folder, self.console = folder, console
        self.config = config = folder.config
        self.prepared = prepared = prepare(
            config.data,
            folder.vocabulary,
            folder.fingerprint,
            progress=lambda doing, *_: heartbeat.busy(doing),
        )
        self.model = Transformer(config.model, *prepared.vocabulary.sizes)
        self.batches = prepared.batches(config.data.batch_tokens, config.train.seed)
        unit = self.batches.per_epoch if config.train.checkpoint_unit == "epoch" else 1
        self.interval = config.train.checkpoint_every * unit
        self.placement = PLACEMENTS[config.train.parallelism]()
        greedy = dataclasses.replace(config.decode, beam_size=1)
        self.translator = Translator(self.model, prepared.vocabulary, greedy)
        self.recovery = RecoveryClock(config.train.recovery_minutes)

    def run(self, stop: StopRequest) -> int:
        """Do what `run_training` says."""
        train = self.config.train
        self._introduce()
        with Checkpoints(
            self.folder.checkpoints,
            self.folder.identity,
            keep=train.keep_checkpoints,
            say=self._say,
        ) as self.checkpoints:
            state, earlier = self._state()
            first = int(state.step)
            if first >= train.steps or self._is_out_of_patience(first):
                self.console.print(f"{self.folder.path} is at step {first} already: nothing to do")
                return len(self.checkpoints.scores)
            self.folder.truncate_metrics(first)
            self.meter = Meter(self.model, peak_flops(self.config.model.dtype), earlier)
            with Logbook(self.folder, self.console, step=first) as self.log:
                compiled = CompiledStep(
                    make_train_step(self.model, train),
                    self.placement,
                    self.log.say,
                    self.meter.paused,
                )
                stop.is_training = True
                for step in range(first + 1, train.steps + 1):
                    batch = self.batches.part(step - 1, self.placement.share)
                    state, metrics = compiled(state, batch)
                    self._check_skipped(step - 2, self.meter.add(metrics, batch))
                    heartbeat.beat(step)
                    self.log.advance(step)
                    self._after(step, state, stop)
                    if self._is_out_of_patience(step):
                        self.log.say(f"no better perplexity in {train.patience} checkpoints: ended")
                        break
            return len(self.checkpoints.scores)

    def _is_out_of_patience(self, step: int) -> bool:
        """Tell whether the checkpoints up to this step have long brought no better perplexity."""
        patience = self.config.train.patience
        if patience is None or step % self.interval:
            return False
        scores = self.checkpoints.scores
        best = min(scores, key=lambda step: scores[step], default=step)
        return step - best >= patience * self.interval

    def _after(self, step: int, state: TrainState, stop: StopRequest) -> None:
        """Report, score and save when it is time to, and end where that was asked for."""
        train = self.config.train
        is_last = step == train.steps
        is_scheduled = step % self.interval == 0
        # Read once: a signal that comes while this goes on is for the next step.
        signal = stop.signal
        is_due = not self.checkpoints.is_writing() and self.recovery.is_due()
        if step % train.log_every == 0 or is_scheduled or is_last or signal:
            self._check_skipped(step, int(self.meter.last.skipped_in_a_row))
        if step % train.log_every == 0 or is_last:
            self._report(step)
        if is_scheduled or is_last or signal or is_due:
            with self.meter.paused():
                dev = self._score(step, state) if is_scheduled or is_last else None
                self.checkpoints.save(
                    step,
                    {"params": state.params, "optimizer": state.optimizer},
                    dev if is_scheduled else None,
                    notes_of(state, self.meter.unreported()),
                )
                self.recovery.saved()
        if signal and not is_last:
            self.checkpoints.wait()
            raise InterruptedRunError(f"{signal.name}: saved at step {step}; {stop.how_to_go_on}")

    def _check_skipped(self, step: int, in_a_row: int) -> None:
        """End a run of which so many steps, up to this one, were skipped, if these are too many."""
        if in_a_row < MOST_SKIPPED:
            return
        path = self.folder.path / "diverged.json"
        pairs = {
            n: self.batches.pairs(n - 1).tolist() for n in range(step - in_a_row + 1, step + 1)
        }
        write_json(path, {"about": "training pairs, of those kept, by step", "pairs": pairs})
        raise DivergedError(
            f"loss or gradient were no finite numbers in {in_a_row} steps in a row, up to "
            f"{step}: {path.name} names the pairs. {CURE}; checkpoints have what was before"
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _introduce(self) -> None:
        devices = self.placement.devices
        params = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(self.model)))
        for line in (
            f"device  {devices[0].device_kind} x {len(devices)}, jax {jax.__version__}",
            f"model   {self.config.model.num_layers}+{self.config.model.num_layers} layers, "
            f"d_model {self.config.model.d_model}, {params:,} parameters",
            f"data    {self.prepared.report['corpus']}: {self.prepared.report['train']['kept']:,} "
            f"pairs, {self.model.vocab_size} pieces",
            f"batches {self.batches.summary}",
        ):
            self._say(line)

    def _state(self) -> tuple[TrainState, Sums]:
        """Return the newest good checkpoint's state, or a fresh one, placed.

        Beside it what that checkpoint had not yet reported.
        """
        shapes = jax.eval_shape(lambda: init_state(self.model, self.config.train))
        latest = self.checkpoints.latest_good()
        if latest is None:
            return self.placement.place_state(init_state(self.model, self.config.train)), []
        parts = {"params": shapes.params, "optimizer": shapes.optimizer}
        found = self.checkpoints.restore(latest, self.placement.targets(parts))
        notes = self.checkpoints.notes(latest)
        try:
            unreported = [[float(x) for x in sums] for sums in notes["unreported"]]
            counts = {name: jnp.int32(notes[name]) for name in ("skipped", "skipped_in_a_row")}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"checkpoint {latest} is not as we write them: {error!r}") from error
        state = TrainState(jnp.int32(latest), **found, **counts)
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
                factor=train.rate_factor,
            )
        )
        self.log.report(step, "train", values)

    def _score(self, step: int, state: TrainState) -> float:
        """Report scores on the development set; return its perplexity."""
        self.log.doing("scoring")
        params = self.placement.on_one_device(state.params)
        dev = perplexity(self.model, params, *self.prepared.pieces("dev"))
        if not math.isfinite(dev):
            raise DivergedError(
                f"at step {step} the perplexity of the development set is {dev}, and nothing of "
                f"it was saved. {CURE}; {self.folder.checkpoints} has what was before"
            )
        values = {"perplexity": dev}
        is_last = step == self.config.train.steps
        if is_last or step % (self.interval * self.config.train.translate_every) == 0:
            sources, references = self.prepared.lines("dev")
            found = self.translator.translate(params, sources)
            hypotheses = [best[0].text for best in found]
            scores = score(hypotheses, references, tokenizer=bleu_tokenizer(self.config.data))
            values |= {"bleu": scores.bleu, "exact": scores.exact}
            self.log.sample(step, sources[:20], hypotheses[:20], references[:20])
        self.log.report(step, "dev", values)
        return dev


def _check_lengths(config: Config, prepared: Prepared) -> None:
    """Refuse sets that the model cannot read, before hours go by."""
    model = config.model
    limits = {"source": model.max_length}
    if model.positions == "learned":
        limits["target"] = model.max_length + MAX_EXTRA_LENGTH
    for split in (split for split in ("dev", "test") if split in prepared.report):
        for side, pieces in zip(SIDES, prepared.pieces(split), strict=True):
            longest = int(pieces.lengths.max())
            if longest > limits.get(side, longest):
                raise DataError(
                    f"a {side} of {split} has {longest} pieces, and the model reads "
                    f"{limits[side]}: raise model.max_length"
                )


def _check_same_shapes(mine: Any, theirs: Any, other: Run) -> None:
    def shapes(tree: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
        return (
            (jax.tree_util.keystr(k), x.shape) for k, x in jax.tree_util.tree_leaves_with_path(tree)
        )

    differing = dict(shapes(mine)).items() ^ dict(shapes(theirs)).items()
    if differing:
        raise UsageError(
            f"the parameters of {other.folder.path} do not fit this model: "
            f"they differ at {min(differing)[0]}"
        )
