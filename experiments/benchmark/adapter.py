"""Benchmarks of this project's training step and search, using the same code that users run.

External benchmarks call `train_step` and `decode`. This project's own benchmark calls the functions
that are defined below those two.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.worker import RunResult, Workload, resident_bytes
from transformer_jax.cache import enable_compilation_cache
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.data.prepare import prepare
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.inference.translate import ROWS, Translator, search
from transformer_jax.model.build import build_transformer
from transformer_jax.model.transformer import Params, init_params
from transformer_jax.special_tokens import EOS, PAD, UNKNOWN
from transformer_jax.training.compiled_step import CompiledStep
from transformer_jax.training.flops import peak_flops, step_flops
from transformer_jax.training.sharding import SHARDINGS
from transformer_jax.training.step import StepMetrics, TrainState, init_state, make_train_step
from transformer_jax.training.throughput import Meter


def make_config(sizes: Mapping[str, Any]) -> Config:
    """Return a config of the paper's model with the given sizes.

    Args:
        sizes: d_model, layers, heads, d_ff, and optionally dtype (default float32) and src
            (source length).
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
            # Match the other libraries, which apply dropout to attention weights.
            "attention_dropout": 0.1,
            "dtype": sizes.get("dtype", "float32"),
            "max_length": max(Config().model.max_length, sizes.get("src", 0)),
        }
    )


class Trainer:
    """A training loop without data preparation, reports, or checkpoints."""

    state: TrainState

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        source_vocab_size: int | None = None,
        *,
        paused: Callable[[], contextlib.AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Draw random parameters, as a run does."""
        self.model = build_transformer(config.model, vocab_size, source_vocab_size)
        self.placement = SHARDINGS[config.train.parallelism]()
        self.compile_seconds = 0.0
        self._paused = paused
        self._step = CompiledStep(make_train_step(self.model, config.train), self.placement)
        self.state = self.placement.place_state(init_state(self.model, config.train))

    def step(self, batch: Batch) -> StepMetrics:
        """Start a step and return its metrics without waiting for them."""
        if not self._step.is_compiled_for(batch):
            with self._paused():
                self.compile_seconds += self._step.compile(self.state, batch).seconds
        self.state, metrics = self._step(self.state, batch)
        return metrics

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))


def mean_loss(metrics: StepMetrics) -> float:
    """Wait for a step to finish and return its loss per token."""
    loss = jax.device_get(metrics.loss)
    return float(loss.smoothed / loss.count)


def train_step(
    sizes: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> tuple[Callable[[], float], int]:
    """Return a function that runs one step and returns its loss; also return the parameter count.

    Args:
        sizes: the sizes that `make_config` takes, and vocab.
        batch: int32 arrays "src" and "tgt_out", without padding.
    """
    trainer = Trainer(make_config(sizes), sizes["vocab"])
    tokens = Batch(batch["src"], batch["tgt_out"])
    return lambda: mean_loss(trainer.step(tokens)), trainer.parameters


def decode(
    sizes: Mapping[str, Any], source: np.ndarray, beam_size: int, steps: int
) -> Callable[[], float]:
    """Return a function that translates the source and returns the mean translation length.

    Args:
        sizes: the sizes that `make_config` takes, and vocab.
        source: int32[sentences, length], without padding.
        beam_size: the size of the beam; 1 means greedy search.
        steps: tokens per translation, including the end token.
    """
    config = make_config(sizes).change(
        decode={"beam_size": beam_size, "max_extra_length": steps - source.shape[1]}
    )
    model = build_transformer(config.model, sizes["vocab"])
    params = suppress_eos(init_params(model, jax.random.key(0)), sizes["layers"])
    batches = [source[start : start + ROWS] for start in range(0, len(source), ROWS)]

    def once() -> float:
        lengths = []
        for rows in batches:
            limit = np.full(len(rows), steps, np.int32)
            result = jax.device_get(search(model, config.decode, 1, params, rows, limit))
            lengths.append((result.tokens[:, 0] != 0).sum(axis=1))
        return float(np.concatenate(lengths).mean())

    return once


def suppress_eos(params: Params, layers: int) -> Params:
    """Return a copy of the parameters, changed so that no translation ends early.

    If all scales of a layer normalization are 1, the elements of its output add up to the sum of
    the layer normalization's biases. With biases of 1 and an end-token embedding whose elements are
    all -100, the logit of the end token is therefore always -100 d_model.
    """
    changed: Any = jax.tree.map(jnp.asarray, params)
    table = changed["embedding"]["table"]
    changed["embedding"]["table"] = table.at[EOS].set(-100.0)
    last = changed[f"decoder_{layers - 1}"]["after_feed_forward"]["norm"]
    last["bias"] = jnp.ones_like(last["bias"])
    return changed


# Each function below returns the `Workload` that a task describes. Tasks are JSON data.


def describe_device(dtype: str, **more: Any) -> dict[str, Any]:
    """Return facts about JAX and the device."""
    [first, *_] = jax.local_devices()
    return {
        "library": f"jax {jax.__version__}",
        "platform": first.platform,
        "device": f"{first.device_kind} x {jax.local_device_count()}",
        "peak_flops": peak_flops(dtype),
        **more,
    }


def read_peak_bytes() -> int:
    """Return the peak memory of the devices, or of the process on a CPU."""
    stats = [one.memory_stats() or {} for one in jax.local_devices()]
    return sum(one.get("peak_bytes_in_use", 0) for one in stats) or resident_bytes()


def report_device(task: Mapping[str, Any]) -> Workload:
    """Return a workload that only reports the device."""
    del task
    return Workload(lambda _: RunResult(1, 0.0), facts=describe_device("bfloat16"))


def load_batches(task: Mapping[str, Any]) -> list[Batch]:
    """Return the batches that `workloads.save_batches` saved."""
    with np.load(task["arrays"], allow_pickle=False) as arrays:
        return [
            Batch(*(arrays[f"{i}.{side}"] for side in Batch._fields))
            for i in range(len(arrays) // len(Batch._fields))
        ]


def train(task: Mapping[str, Any]) -> Workload:
    """Train on preloaded batches, cycling through them.

    Args:
        task: the sizes of the model, and the path of the saved batches.
    """
    enable_compilation_cache()
    sizes, batches = task["sizes"], load_batches(task)
    config = make_config(sizes)
    trainer = Trainer(config, sizes["vocab"])
    around = itertools.cycle((batch, int((batch.target != PAD).sum())) for batch in batches)
    about = describe_device(config.model.dtype, parameters=trainer.parameters)

    def turn(steps: int) -> RunResult:
        some = list(itertools.islice(around, steps))
        *_, last = [trainer.step(batch) for batch, _ in some]
        loss = mean_loss(last)
        about["compile_seconds"] = trainer.compile_seconds
        return RunResult(sum(count for _, count in some), loss)

    return Workload(turn, len(batches), about, read_peak_bytes)


class NumberVocabulary:
    """A vocabulary whose words are token IDs, for sources that are not text."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each line, including the end token, as a tokenizer does."""
        return [[*map(int, line.split()), EOS] for line in lines]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return one line per row of tokens, without padding and end tokens."""
        return [" ".join(str(p) for p in row if p not in (PAD, EOS)) for row in rows]


def translate(task: Mapping[str, Any]) -> Workload:
    """Translate all sentences in the same way as `transformer-jax translate`.

    Args:
        task: sizes; sources (lists of tokens with end tokens); beam_size; and extra (the number of
            tokens by which a translation is longer than its source).
    """
    enable_compilation_cache()
    sizes = task["sizes"]
    decoding = {"beam_size": task["beam_size"], "max_extra_length": task["extra"]}
    config = make_config(sizes).change(decode=decoding)
    model = build_transformer(config.model, sizes["vocab"])
    params = suppress_eos(init_params(model, jax.random.key(0)), sizes["layers"])
    numerals = NumberVocabulary(sizes["vocab"])
    words: Any = numerals
    translator = Translator(model, Vocabulary.shared(words), config.decode)
    lines = numerals.decode(task["sources"])

    def turn(steps: int) -> RunResult:
        *_, result = [translator.translate(params, lines) for _ in range(steps)]
        # Add the end token, which is not a word.
        lengths = [len(best[0].text.split()) + 1 for best in result]
        return RunResult(steps * len(lines), float(np.mean(lengths)))

    return Workload(turn, 1, describe_device(config.model.dtype), read_peak_bytes)


def pipeline(task: Mapping[str, Any]) -> Workload:
    """Train on a config's text in the same way as a run does between two reports.

    Args:
        task: a config as JSON data; is_preloaded (train on preloaded full batches of the same
            shapes in the same order); and the number of steps.
    """
    enable_compilation_cache()
    config = Config.from_dict(task["config"])
    prepared = prepare(config.data)
    sizes = prepared.vocabulary.sizes
    batches = prepared.batches(config.data.batch_tokens, config.train.seed)
    # Measure the peak FLOP/s only once, because the measurement takes time.
    about = describe_device(
        config.model.dtype, shapes=len(batches.buckets), density=batches.density
    )
    meter = Meter(about["peak_flops"], [])
    trainer = Trainer(config, **sizes, paused=meter.paused)
    kept = {shape[:3]: _random_batch(shape, **sizes) for shape in batches.buckets}
    # A batch must be gathered before its shape is known, so gather all batches before timing
    # starts.
    each = (batches[step] for step in range(task["steps"] if task["is_preloaded"] else 0))
    shape_of = [(*batch.source.shape, batch.target.shape[1]) for batch in each]
    about.update(parameters=trainer.parameters, batches_per_epoch=batches.per_epoch)

    def stream() -> Iterator[Batch]:
        # The first call compiles every shape.
        yield from kept.values()
        if task["is_preloaded"]:
            yield from (kept[shape] for shape in shape_of)
        else:
            yield from (batches.local_batch(s, trainer.placement.shard) for s in itertools.count())

    at_hand = stream()

    def turn(steps: int) -> RunResult:
        for batch in itertools.islice(at_hand, steps):
            meter.add(trainer.step(batch), step_flops(config.model, sizes["vocab_size"], batch))
        loss = mean_loss(meter.last)
        tokens = sum(count for *_, count in meter.pending_metrics())
        meter.read()
        about["compile_seconds"] = trainer.compile_seconds
        return RunResult(tokens, loss)

    return Workload(turn, len(kept), about, read_peak_bytes)


def _random_batch(shape: Bucket, vocab_size: int, source_vocab_size: int | None) -> Batch:
    """Return a random batch of the given shape without padding."""
    rng = np.random.default_rng(0)
    source_size = source_vocab_size or vocab_size
    return Batch(
        rng.integers(UNKNOWN + 1, source_size, (shape.rows, shape.source), dtype=np.int32),
        rng.integers(UNKNOWN + 1, vocab_size, (shape.rows, shape.target), dtype=np.int32),
    )
