"""This project as a benchmark's contestant: its own train step and search, as a user runs them.

A benchmark hands over sizes and pieces, and gets a function that does the work.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.contestant import Done, Entrant, resident_bytes
from transformer_jax.cache import enable_compilation_cache
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.data.prepare import prepare
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.inference.translate import ROWS, Translator, search
from transformer_jax.model.build import build_transformer
from transformer_jax.model.transformer import Params, init_params
from transformer_jax.special_tokens import EOS, PAD, UNKNOWN
from transformer_jax.training.flops import peak_flops
from transformer_jax.training.sharding import SHARDINGS, CompiledStep
from transformer_jax.training.step import StepMetrics, TrainState, init_state, make_train_step
from transformer_jax.training.throughput import Meter


def config_of(sizes: Mapping[str, Any]) -> Config:
    """Return the paper's model in these sizes.

    Args:
        sizes: d_model, layers, heads, d_ff, as benchmarks of other libraries name them; dtype,
            where it is not float32.
    """
    width = sizes["d_model"] // sizes["heads"]
    return Config().change(
        model={
            "num_layers": sizes["layers"],
            "d_model": sizes["d_model"],
            "d_ff": sizes["d_ff"],
            "num_heads": sizes["heads"],
            "d_k": width,
            "d_v": width,
            # As other libraries have it.
            "attention_dropout": 0.1,
            "dtype": sizes.get("dtype", "float32"),
            "max_length": max(Config().model.max_length, sizes.get("src", 0)),
        }
    )


class Trainer:
    """A model in training, without data, reports and checkpoints."""

    state: TrainState

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        source_vocab_size: int | None = None,
        *,
        paused: Callable[[], contextlib.AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Begin, as a run does, with random parameters."""
        self.model = build_transformer(config.model, vocab_size, source_vocab_size)
        self.placement = SHARDINGS[config.train.parallelism]()
        self.compile_seconds = 0.0
        self._paused = paused
        self._step = CompiledStep(
            make_train_step(self.model, config.train),
            self.placement,
            lambda _: None,
            self._compiling,
        )
        self.state = self.placement.place_state(init_state(self.model, config.train))

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with self._paused():
            began = time.perf_counter()
            yield
            self.compile_seconds += time.perf_counter() - began

    def step(self, batch: Batch) -> StepMetrics:
        """Do a step, which goes on when this returns; return its metrics."""
        self.state, metrics = self._step(self.state, batch)
        return metrics

    @property
    def parameters(self) -> int:
        """How many numbers are learnt."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))


def mean_loss(metrics: StepMetrics) -> float:
    """Wait for a step; return its loss per token."""
    loss = jax.device_get(metrics.loss)
    return float(loss.smoothed / loss.count)


def train_step(
    sizes: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> tuple[Callable[[], float], int]:
    """Return what runs one train step and gives its loss, and the number of parameters.

    Args:
        sizes: as `config_of` takes them, and vocab.
        batch: int32 arrays "src" and "tgt_out", without padding.
    """
    trainer = Trainer(config_of(sizes), sizes["vocab"])
    pieces = Batch(batch["src"], batch["tgt_out"])
    return lambda: mean_loss(trainer.step(pieces)), trainer.parameters


def decode(
    sizes: Mapping[str, Any], source: np.ndarray, beam_size: int, steps: int
) -> Callable[[], float]:
    """Return what translates all sentences into exactly `steps` pieces and gives their mean length.

    Args:
        sizes: as `config_of` takes them, and vocab.
        source: int32[sentences, length], without padding.
        beam_size: 1 is greedy search.
        steps: pieces of each translation, its end included.
    """
    config = config_of(sizes).change(
        decode={"beam_size": beam_size, "max_extra_length": steps - source.shape[1]}
    )
    model = build_transformer(config.model, sizes["vocab"])
    params = never_ending(init_params(model, jax.random.key(0)), sizes["layers"])
    batches = [source[start : start + ROWS] for start in range(0, len(source), ROWS)]

    def once() -> float:
        lengths = []
        for rows in batches:
            limit = np.full(len(rows), steps, np.int32)
            found = jax.device_get(search(model, config.decode, 1, params, rows, limit))
            lengths.append((found.tokens[:, 0] != 0).sum(axis=1))
        return float(np.concatenate(lengths).mean())

    return once


def never_ending(params: Params, layers: int) -> Params:
    """Return parameters by which no end is likely, so that every search takes all its steps.

    What the last layer normalisation gives sums up to the sum of its biases: with biases of one,
    an end piece whose vector is -100 everywhere has the logit -100 d_model, wherever it may come.
    """
    changed: Any = jax.tree.map(jnp.asarray, params)
    table = changed["embedding"]["table"]
    changed["embedding"]["table"] = table.at[EOS].set(-100.0)
    last = changed[f"decoder_{layers - 1}"]["after_feed_forward"]["norm"]
    last["bias"] = jnp.ones_like(last["bias"])
    return changed


# What follows are makers of this package's own contestants, from a task as plain data.


def facts(dtype: str, **more: Any) -> dict[str, Any]:
    """Return what a result says of JAX and the device."""
    [first, *_] = jax.local_devices()
    return {
        "library": f"jax {jax.__version__}",
        "platform": first.platform,
        "device": f"{first.device_kind} x {jax.local_device_count()}",
        "peak_flops": peak_flops(dtype),
        **more,
    }


def peak_bytes() -> int:
    """Return the most memory that was held: the device's, or on a CPU the process's."""
    stats = [one.memory_stats() or {} for one in jax.local_devices()]
    return sum(one.get("peak_bytes_in_use", 0) for one in stats) or resident_bytes()


def device(task: Mapping[str, Any]) -> Entrant:
    """Do nothing, but say what there is to work on."""
    del task
    return Entrant(lambda _: Done(1, 0.0), facts=facts("bfloat16"))


def loaded(task: Mapping[str, Any]) -> list[Batch]:
    """Return the batches that `work.save` kept."""
    with np.load(task["arrays"], allow_pickle=False) as arrays:
        return [
            Batch(*(arrays[f"{i}.{side}"] for side in Batch._fields))
            for i in range(len(arrays) // len(Batch._fields))
        ]


def train(task: Mapping[str, Any]) -> Entrant:
    """Train on batches that are at hand, over and over.

    Args:
        task: sizes, and the arrays' path.
    """
    enable_compilation_cache()
    sizes, batches = task["sizes"], loaded(task)
    config = config_of(sizes)
    trainer = Trainer(config, sizes["vocab"])
    around = itertools.cycle((batch, int((batch.target != PAD).sum())) for batch in batches)
    about = facts(config.model.dtype, parameters=trainer.parameters)

    def turn(steps: int) -> Done:
        some = list(itertools.islice(around, steps))
        *_, last = [trainer.step(batch) for batch, _ in some]
        loss = mean_loss(last)
        about["compile_seconds"] = trainer.compile_seconds
        return Done(sum(count for _, count in some), loss)

    return Entrant(turn, len(batches), about, peak_bytes)


class Numerals:
    """A vocabulary whose words are the numbers of its pieces, for sources that are no text."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, with their end, as a tokenizer does."""
        return [[*map(int, line.split()), EOS] for line in lines]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return a line for each row of pieces, without its end."""
        return [" ".join(str(p) for p in row if p not in (PAD, EOS)) for row in rows]


def translate(task: Mapping[str, Any]) -> Entrant:
    """Translate all sentences, as `transformer-jax translate` does.

    Args:
        task: sizes, sources (lists of pieces with their ends), beam_size, and extra: a
            translation has so many pieces more than its source, its end counted.
    """
    enable_compilation_cache()
    sizes = task["sizes"]
    decoding = {"beam_size": task["beam_size"], "max_extra_length": task["extra"]}
    config = config_of(sizes).change(decode=decoding)
    model = build_transformer(config.model, sizes["vocab"])
    params = never_ending(init_params(model, jax.random.key(0)), sizes["layers"])
    numerals = Numerals(sizes["vocab"])
    words: Any = numerals
    translator = Translator(model, Vocabulary.shared(words), config.decode)
    lines = numerals.decode(task["sources"])

    def turn(steps: int) -> Done:
        *_, found = [translator.translate(params, lines) for _ in range(steps)]
        # With the end, which is no word.
        lengths = [len(best[0].text.split()) + 1 for best in found]
        return Done(steps * len(lines), float(np.mean(lengths)))

    return Entrant(turn, 1, facts(config.model.dtype), peak_bytes)


def pipeline(task: Mapping[str, Any]) -> Entrant:
    """Train on a config's own text, batch after batch, as a run does between two reports.

    Args:
        task: a config as plain data; is_kept, to train on batches of the same shapes, in the same
            order, that are at hand already and have no padding; steps that will be done.
    """
    enable_compilation_cache()
    config = Config.from_dict(task["config"])
    prepared = prepare(config.data)
    sizes = prepared.vocabulary.sizes
    batches = prepared.batches(config.data.batch_tokens, config.train.seed)
    # The peak is asked for once; what a report says is of no interest here.
    about = facts(config.model.dtype, shapes=len(batches.buckets), fill=batches.density)
    meter = Meter(build_transformer(config.model, **sizes), about["peak_flops"], [])
    trainer = Trainer(config, **sizes, paused=meter.paused)
    kept = {shape[:3]: _full(shape, **sizes) for shape in batches.buckets}
    # Before any clock runs: to know a batch's shape is to gather it.
    each = (batches[step] for step in range(task["steps"] if task["is_kept"] else 0))
    shape_of = [(*batch.source.shape, batch.target.shape[1]) for batch in each]
    about.update(parameters=trainer.parameters, batches_per_epoch=batches.per_epoch)

    def stream() -> Iterator[Batch]:
        # So that every shape is compiled by the first call.
        yield from kept.values()
        if task["is_kept"]:
            yield from (kept[shape] for shape in shape_of)
        else:
            yield from (batches.local_batch(s, trainer.placement.shard) for s in itertools.count())

    at_hand = stream()

    def turn(steps: int) -> Done:
        for batch in itertools.islice(at_hand, steps):
            meter.add(trainer.step(batch), batch)
        loss = mean_loss(meter.last)
        tokens = sum(count for *_, count in meter.pending_metrics())
        meter.read()
        about["compile_seconds"] = trainer.compile_seconds
        return Done(tokens, loss)

    return Entrant(turn, len(kept), about, peak_bytes)


def _full(shape: Bucket, vocab_size: int, source_vocab_size: int | None) -> Batch:
    """Return a batch of this shape without padding."""
    rng = np.random.default_rng(0)
    return Batch(
        rng.integers(
            UNKNOWN + 1, source_vocab_size or vocab_size, (shape.rows, shape.source), dtype=np.int32
        ),
        rng.integers(UNKNOWN + 1, vocab_size, (shape.rows, shape.target), dtype=np.int32),
    )
