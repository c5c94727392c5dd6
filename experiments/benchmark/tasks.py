"""Tasks for this project's workers: training, translation, serving, and the training loop.

A worker passes its task (JSON data) to one of the functions in this module. The function returns
the `Workload` that the task describes.
"""

import itertools
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmark.adapter import Trainer, make_config, mean_loss, suppress_eos
from experiments.benchmark.worker import RunResult, Workload, resident_bytes
from experiments.benchmark.workloads import random_tokens
from transformer_jax.api import train_folder
from transformer_jax.backend import start_backend
from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, Batches, Bucket
from transformer_jax.data.prepare import prepare_text
from transformer_jax.data.tokenizer import Vocabulary
from transformer_jax.errors import UsageError
from transformer_jax.inference.trained_run import load
from transformer_jax.inference.translate import Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import init_params
from transformer_jax.special_tokens import EOS, PAD
from transformer_jax.training.flops import peak_flops


def describe_device(dtype: str, **more: object) -> dict[str, Any]:
    """Return the version of JAX, the devices, and their peak FLOP/s for a data type."""
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
        task: a mapping with the keys `sizes` and `arrays` (the path to the saved batches), and
            optionally `changes` (to the config) and `runs` (the number of runs in one program).
    """
    start_backend()
    sizes, num_runs = task["sizes"], task.get("runs", 1)
    config = make_config(sizes).change(**task.get("changes", {}))
    trainer = Trainer(config, sizes["vocab"], num_runs=num_runs)
    batches = [trainer.slots.join([batch] * num_runs) for batch in load_batches(task)]
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
        """Return the tokens in each line, including the end token, as a tokenizer does."""
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


def loop(task: Mapping[str, Any]) -> Workload:
    """Train a run with the training loop, which waits after each turn.

    The first turn compiles all shapes, so it trains until all of them have occurred.

    Args:
        task: a mapping with the keys `config` (JSON data), `folder` (for the run), and `turn` (the
            number of steps in a turn). The config must schedule a report after each turn.
    """
    start_backend()
    config = Config.from_dict(task["config"])
    about = describe_device(config.model.dtype)
    batches = prepare_text(config.data).batches(config)
    reports = queue.SimpleQueue[Mapping[str, float] | BaseException]()
    turns = queue.SimpleQueue[None]()
    first = _count_steps_until_all_shapes(batches, task["turn"])
    at = itertools.count(0, task["turn"])

    def wait_for_turn(values: Mapping[str, float]) -> None:
        # The last checkpoint has a report without a training loss.
        if "train/loss" in values:
            reports.put(values)
            turns.get()

    def train_run() -> None:
        # This thread passes any failure to the main thread, which reports it.
        try:
            train_folder(config, Path(task["folder"]), callback=wait_for_turn, quiet=True)
            reports.put(UsageError("the run is too short for all turns: raise train.steps"))
        except BaseException as error:  # noqa: BLE001
            reports.put(error)

    thread = threading.Thread(target=train_run, daemon=True)

    def turn(steps: int) -> RunResult:
        tokens, loss = 0, 0.0
        for start in itertools.islice(at, steps // task["turn"]):
            turns.put(None) if thread.is_alive() else thread.start()
            report = reports.get()
            if isinstance(report, BaseException):
                raise report
            loss = report["train/loss"]
            tokens += _count_tokens(batches, range(start, start + task["turn"]))
        return RunResult(tokens, loss)

    return Workload(turn, first, about, read_peak_bytes)


def preloaded(task: Mapping[str, Any]) -> Workload:
    """Run the same steps as `loop`, but on preloaded random batches of the same shapes.

    The reported number of tokens is the number in the batches of text, which contain padding.

    Args:
        task: a mapping with the keys `config` (JSON data) and `turn` (the number of steps in a
            turn).
    """
    start_backend()
    config = Config.from_dict(task["config"])
    prepared = prepare_text(config.data)
    sizes, batches = prepared.vocabulary.sizes, prepared.batches(config)
    trainer = Trainer(config, **sizes)
    about = describe_device(config.model.dtype, density=batches.density)
    about.update(parameters=trainer.parameters, shapes=len(batches.buckets))
    placed: dict[Bucket, tuple[Batch, Batch]] = {}
    for shape in batches.buckets:
        batch = _random_batch(shape, **sizes)
        placed[shape] = batch, trainer.sharding.place_batch(batch)
    at = itertools.count()

    def turn(steps: int) -> RunResult:
        some = list(itertools.islice(at, steps))
        shapes = [batches.upcoming(n, n + 1)[0] for n in some]
        *_, last = [trainer.step(*placed[shape]) for shape in shapes]
        loss = mean_loss(last)
        about["compile_seconds"] = trainer.compile_seconds
        return RunResult(_count_tokens(batches, some), loss)

    first = _count_steps_until_all_shapes(batches, task["turn"])
    return Workload(turn, first, about, read_peak_bytes)


def _count_tokens(batches: Batches, steps: Iterable[int]) -> int:
    return sum(int(batches.lengths(n)[1].sum()) for n in steps)


def _count_steps_until_all_shapes(batches: Batches, multiple: int) -> int:
    """Return the smallest multiple of `multiple` after which all batch shapes have occurred."""
    steps = range(multiple, batches.per_epoch + multiple, multiple)
    return next(n for n in steps if len(batches.upcoming(0, n)) == len(batches.buckets))


def _random_batch(shape: Bucket, vocab_size: int, source_vocab_size: int | None) -> Batch:
    """Return a random batch of the given shape, without padding."""
    rng = np.random.default_rng(0)
    source = random_tokens(rng, source_vocab_size or vocab_size, shape.rows, shape.source)
    return Batch(source, random_tokens(rng, vocab_size, shape.rows, shape.target))
