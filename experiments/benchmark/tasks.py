"""Tasks for this project's workers: training, translation, serving, and the input pipeline.

A worker passes its task (JSON data) to one of the functions in this module. The function returns
the `Workload` that the task describes.
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import transformer_jax
from experiments.benchmark.adapter import Trainer, make_config, mean_loss, suppress_eos
from experiments.benchmark.worker import RunResult, Workload, resident_bytes
from experiments.benchmark.workloads import random_tokens
from transformer_jax.backend import start_backend
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.files import read_json_object
from transformer_jax.inference.trained_run import load
from transformer_jax.inference.translate import Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import init_params
from transformer_jax.parallel import map_ahead
from transformer_jax.runs.metrics_file import read_metrics
from transformer_jax.special_tokens import EOS, PAD
from transformer_jax.training.flops import peak_flops, step_flops
from transformer_jax.training.meter import Meter


def describe_device(dtype: str, **more: object) -> dict[str, Any]:
    """Return details about JAX and the device."""
    [first, *_] = jax.local_devices()
    return {
        "library": f"jax {jax.__version__}",
        "platform": first.platform,
        "device": f"{first.device_kind} x {jax.local_device_count()}",
        "peak_flops": peak_flops(dtype),
        **more,
    }


def read_peak_bytes() -> int:
    """Return the peak memory of the devices or, on a CPU, of the process."""
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
        task: a mapping with the keys `sizes` and `arrays` (the path to the saved batches).
    """
    start_backend()
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
        """Return one line per row of tokens, without padding or end tokens."""
        return [" ".join(str(p) for p in row if p not in (PAD, EOS)) for row in rows]


def translate(task: Mapping[str, Any]) -> Workload:
    """Translate all sentences the way `transformer-jax translate` does.

    Args:
        task: a mapping with the keys `sizes`, `sources` (lists of tokens with end tokens),
            `beam_size`, and `extra` (how many tokens longer a translation is than its source).
    """
    start_backend()
    sizes = task["sizes"]
    decoding = {"beam_size": task["beam_size"], "max_extra_length": task["extra"]}
    config = make_config(sizes).change(decode=decoding)
    model = build_transformer(config.model, sizes["vocab"])
    params = suppress_eos(init_params(model, jax.random.key(0)), sizes["layers"])
    numerals = NumberVocabulary(sizes["vocab"])
    words: Any = numerals
    translator = Translator(model, Vocabulary.share(words), config.decode)
    lines = numerals.decode(task["sources"])

    def turn(steps: int) -> RunResult:
        *_, result = [translator.translate(params, lines) for _ in range(steps)]
        # The text does not contain the end-of-sentence token, so add 1.
        lengths = [len(best[0].text.split()) + 1 for best in result]
        return RunResult(steps * len(lines), float(np.mean(lengths)))

    return Workload(turn, 1, describe_device(config.model.dtype), read_peak_bytes)


def serve(task: Mapping[str, Any]) -> Workload:
    """Translate lines of text with a run's model, including tokenization and detokenization.

    Args:
        task: a mapping with the keys `run` (a path), `lines`, `beam_size`, and `alpha` (the
            exponent of the length penalty).
    """
    run = load(task["run"])
    decoding = {
        "beam_size": task["beam_size"],
        "length_penalty": "power",
        "length_penalty_alpha": task["alpha"],
    }

    def turn(steps: int) -> RunResult:
        *_, translations = [run.translate(task["lines"], **decoding) for _ in range(steps)]
        return RunResult(
            steps * len(translations), float(np.mean([len(line) for line in translations]))
        )

    return Workload(turn, 1, describe_device(run.config.model.dtype), read_peak_bytes)


def sweep(task: Mapping[str, Any]) -> Workload:
    """Train and score one row with several seeds, as `transformer-jax sweep` does.

    The sweep's own processes use the device, so this process must not.

    Args:
        task: a mapping with the keys `config` (JSON data) and `seeds` (their number).
    """
    config = Config.from_dict(task["config"])
    prepared = prepare_text(config.data)
    tokens = 0
    for seed in range(task["seeds"]):
        batches = prepared.batches(config.change(train={"seed": seed}))
        tokens += sum(int(batches.lengths(n)[1].sum()) for n in range(config.train.steps))
    about: dict[str, Any] = {"library": f"jax {jax.__version__}"}

    def turn(steps: int) -> RunResult:
        scores: list[float] = []
        for _ in range(steps):
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                planned = transformer_jax.sweep(
                    {"base": config}, Path(folder) / "sweep", seeds=task["seeds"], quiet=True
                )
                for run in planned.runs:
                    reports = read_metrics(run.path / "metrics.jsonl")
                    scores += [x["perplexity"] for x in reports[-1:]]
                    [stored] = run.path.glob(f"checkpoints/{config.train.steps}/checkpoint.json")
                    devices = read_json_object(stored)["custom_metadata"]["devices"]
                    count, _, kind = devices.partition(" x ")
                    about["device"] = f"{kind} x {count}"
        return RunResult(steps * tokens, float(np.mean(scores)))

    return Workload(turn, 1, about)


def pipeline(task: Mapping[str, Any]) -> Workload:
    """Train on a config's text, doing the same work per step as the training loop.

    Args:
        task: a mapping with the keys `config` (JSON data), `steps`, and `is_preloaded`. If
            `is_preloaded` is true, train on preloaded full batches that have the same shapes as the
            text's batches, in the same order.
    """
    start_backend()
    config = Config.from_dict(task["config"])
    prepared = prepare_text(config.data)
    sizes = prepared.vocabulary.sizes
    batches = prepared.batches(config)
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

    def stream() -> Iterator[Batch | int]:
        # The first call compiles the training step for every batch shape.
        yield from kept.values()
        if task["is_preloaded"]:
            yield from (kept[shape] for shape in shape_of)
        else:
            yield from itertools.count()

    def read(source: Batch | int) -> tuple[Batch, Batch]:
        shard = trainer.sharding.shard
        batch = batches.local_batch(source, shard) if isinstance(source, int) else source
        return batch, trainer.sharding.place_batch(batch)

    # As in a run, a thread reads the next batches and copies them to the devices.
    at_hand = map_ahead(read, stream())

    def turn(steps: int) -> RunResult:
        for batch, placed in itertools.islice(at_hand, steps):
            meter.add(
                trainer.step(batch, placed), step_flops(config.model, sizes["vocab_size"], batch)
            )
            meter.wait_for_earlier_step()
        loss = mean_loss(meter.last)
        tokens = sum(count for *_, count in meter.pending_metrics())
        meter.read()
        about["compile_seconds"] = trainer.compile_seconds
        return RunResult(tokens, loss)

    return Workload(turn, len(kept), about, read_peak_bytes)


def _random_batch(shape: Bucket, vocab_size: int, source_vocab_size: int | None) -> Batch:
    """Return a random batch of the given shape, without padding."""
    rng = np.random.default_rng(0)
    source = random_tokens(rng, source_vocab_size or vocab_size, shape.rows, shape.source)
    return Batch(source, random_tokens(rng, vocab_size, shape.rows, shape.target))
