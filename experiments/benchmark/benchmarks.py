"""Benchmarks of training, decoding, the training loop, and the cost of longer sentences."""

import dataclasses
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.benchmark.adapter import make_config
from experiments.benchmark.measurements import Benchmark, summarize
from experiments.benchmark.rounds import Settings, WorkerSpec, quartiles, run_rounds
from experiments.benchmark.workloads import (
    Sizes,
    count_target_tokens,
    full_batch,
    random_sources,
    save_batches,
)
from transformer_jax.config import Config
from transformer_jax.config.validation import did_you_mean
from transformer_jax.errors import UsageError
from transformer_jax.training.flops import batch_flops

# For each worker, the function that returns its workload.
TRAINERS = {"ours": "tasks.train", "torch": "peers.train", "torch-compiled": "peers.train"}
DECODERS = {"ours": "tasks.translate", "ctranslate2": "peers.ctranslate2", "hf": "peers.generate"}
# Sentence lengths to compare. Steps have the same number of tokens at every length.
LENGTHS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Variant:
    """A variant of this project's training step."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the config, by section."""
    flags: str = ""
    """Flags to add to XLA_FLAGS."""
    num_runs: int = 1
    """The number of runs in one program."""

    def describe_worker(self, name: str, task: Mapping[str, Any], settings: Settings) -> WorkerSpec:
        """Return a worker that trains with this variant, given a task for `tasks.train`."""
        task = {**task, "changes": self.changes, "runs": self.num_runs}
        spec = settings.describe_worker(name, "tasks.train", task)
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()
        more = {"XLA_FLAGS": flags} if self.flags else {}
        return replace(spec, environment={**spec.environment, **more})


@contextmanager
def isolated_cache(settings: Settings) -> Iterator[tuple[Settings, Path]]:
    """Yield settings for empty compilation caches, and the temporary folder that contains them."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        cache = {
            # Use the same cache settings as `transformer_jax.cache`, but with an empty folder.
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        yield replace(settings, environment={**settings.environment, **cache}), Path(folder)


def select_names(only: str | None, known: Collection[str], usual: Iterable[str]) -> list[str]:
    """Return the workers in the comma-separated list `only`, or `usual` if `only` is None.

    Raises:
        UsageError: a worker's name is unknown.
    """
    names = list(usual) if only is None else [name for name in only.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(
                f"no worker {name!r}{did_you_mean(name, known)} (available: {', '.join(known)})"
            )
    return list(dict.fromkeys(names))


def train(
    name: str,
    sizes: Sizes,
    settings: Settings,
    *,
    only: str | None = None,
    usual: Sequence[str] = ("ours", "torch"),
    references: Sequence[str] = ("torch", "torch-compiled"),
    variants: Mapping[str, Variant] | None = None,
    again: bool = True,
) -> Benchmark:
    """Compare the speed of training steps on a batch without padding.

    Args:
        name: the name of the benchmark.
        sizes: the dimensions of the model and of the batch.
        settings: the measurement settings.
        only: a comma-separated list of workers.
        usual: the workers to run if `only` is None.
        references: candidates for the reference worker, in order of preference. The first
            candidate that ran becomes the reference.
        variants: additional workers for this project, keyed by name.
        again: whether to start this project's worker a second time at the end, to measure how much
            time the compilation cache saves.
    """
    batch, variants = full_batch(sizes), variants or {}
    config = make_config(dataclasses.asdict(sizes)).model
    flops = batch_flops(config, sizes.vocab, batch) / count_target_tokens(batch)
    with isolated_cache(settings) as (inside, folder):
        task = {
            "sizes": dataclasses.asdict(sizes),
            "arrays": save_batches(folder / "work.npz", [batch]),
        }
        specs = {
            key: inside.describe_worker(
                key, TRAINERS[key], {"is_compiled": key == "torch-compiled", **task}
            )
            for key in select_names(only, TRAINERS, usual)
        }
        specs |= {key: one.describe_worker(key, task, inside) for key, one in variants.items()}
        result = summarize(
            run_rounds(list(specs.values()), inside),
            name,
            unit="target tokens",
            work={"steps": settings.steps, **task["sizes"]},
            references=references,
            flops=flops,
        )
        if again and "ours" in result.measurements:
            second = run_rounds([specs["ours"]], replace(inside, rounds=0)).workers
            if "ours" in second:
                seconds = second["ours"].startup.first_seconds
                ours = replace(result.measurements["ours"], second_start_seconds=seconds)
                return replace(result, measurements={**result.measurements, "ours": ours})
    return result


def decode(
    name: str,
    sizes: Sizes,
    settings: Settings,
    *,
    beam_size: int,
    sources: Sequence[Sequence[int]] = (),
    extra: int = 19,
    only: str | None = None,
    usual: Sequence[str] = tuple(DECODERS),
    references: Sequence[str] = ("ctranslate2", "hf"),
) -> Benchmark:
    """Compare decoding speeds, using random parameters for which no translation ends early.

    Args:
        name: the name of the benchmark.
        sizes: the dimensions of the model.
        settings: the measurement settings.
        beam_size: the beam size; 1 means greedy search.
        sources: the tokens of each source, including EOS. Default: 64 random sources of 20 tokens,
            plus EOS.
        extra: the number of tokens by which a translation exceeds its source.
        only: a comma-separated list of workers.
        usual: the workers to run if `only` is None.
        references: candidates for the reference worker, in order of preference. The first
            candidate that ran becomes the reference.
    """
    sources = sources or random_sources(sizes, count=64, length=20)
    task = {
        "sizes": dataclasses.asdict(sizes),
        "sources": [list(source) for source in sources],
        "beam_size": beam_size,
        "extra": extra,
    }
    names = select_names(only, DECODERS, usual)
    with isolated_cache(settings) as (inside, _):
        rounds = run_rounds(
            [inside.describe_worker(key, DECODERS[key], task) for key in names], inside
        )
    lengths = [len(source) for source in sources]
    return summarize(
        rounds,
        name,
        unit="sentences",
        work={
            **{key: task["sizes"][key] for key in ("d_model", "layers", "heads", "d_ff", "vocab")},
            "dtype": sizes.dtype,
            "beam_size": beam_size,
            "extra": extra,
            "sentences": len(sources),
            "source_tokens": sum(lengths),
        },
        references=references,
    )


def loop(name: str, config: Config, settings: Settings) -> Benchmark:
    """Compare a run's training loop with the same steps on preloaded batches of the same shapes.

    The run reads, gathers, and places batches, and reports after each round. It is not evaluated.
    """
    steps = settings.steps * (2 + settings.rounds)
    with isolated_cache(settings) as (inside, folder):
        config = config.change(
            train={
                "steps": config.train.steps + steps,
                "log_every": settings.steps,
                "checkpoint_unit": "step",
                "checkpoint_every": config.train.steps + steps,
            }
        )
        task = {"config": config.to_dict(), "turn": settings.steps, "folder": str(folder / "run")}
        # The second worker loads the programs that the first one compiled.
        specs = [inside.describe_worker(key, f"tasks.{key}", task) for key in ("preloaded", "loop")]
        rounds = run_rounds(specs, inside)
    about = {
        "steps": settings.steps,
        "rounds": settings.rounds,
        **{f"model.{k}": v for k, v in config.to_dict()["model"].items()},
        "data.corpus": config.data.corpus,
        "data.batch_tokens": config.data.batch_tokens,
    }
    notes = list[str]()
    if "preloaded" in rounds.workers:
        facts = rounds.workers["preloaded"].startup.facts
        notes.append(
            f"The batches have {facts['shapes']} shapes, and {facts['density']:.1%} of the "
            "positions are tokens, for both workers."
        )
    references = ("preloaded",)
    return summarize(
        rounds, name, unit="target tokens", work=about, references=references, notes=notes
    )


def scaling(sizes: Sizes, settings: Settings, lengths: Sequence[int], tokens: int) -> Benchmark:
    """Compare training speed across sentence lengths, with the same number of tokens per step."""
    with isolated_cache(settings) as (inside, folder):
        specs = []
        flops: dict[int, float] = {}
        for length in lengths:
            some = replace(sizes, batch=max(1, tokens // length), src=length, tgt=length)
            batch = full_batch(some)
            data = dataclasses.asdict(some)
            flops[length] = batch_flops(make_config(data).model, some.vocab, batch)
            task = {"sizes": data, "arrays": save_batches(folder / f"{length}.npz", [batch])}
            specs.append(inside.describe_worker(str(length), "tasks.train", task))
        first = str(lengths[0])
        result = summarize(
            run_rounds(specs, inside),
            "scaling",
            unit="target tokens",
            work={**dataclasses.asdict(sizes), "tokens": tokens},
            references=(first,),
        )
    notes = [
        f"A step at length {length} takes {1 / quartiles(result.ratios(str(length))).median:.2f} "
        f"times as long as at length {first}, with {flops[length] / flops[lengths[0]]:.2f} times "
        "the model FLOPs."
        for length in lengths[1:]
        if result.reference == first and str(length) in result.measurements
    ]
    return replace(result, notes=notes)
