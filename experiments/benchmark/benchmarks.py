"""Benchmarks of training, decoding, the input pipeline, and the cost of longer sentences."""

import dataclasses
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.benchmark.adapter import make_config
from experiments.benchmark.measurements import Benchmark, summarize
from experiments.benchmark.rounds import Settings, quartiles, run_rounds
from experiments.benchmark.workloads import (
    Sizes,
    count_target_tokens,
    full_batch,
    random_sources,
    save_batches,
)
from transformer_jax.config import Config
from transformer_jax.config.validation import did_you_mean
from transformer_jax.data.batches import Batch
from transformer_jax.errors import UsageError
from transformer_jax.training.flops import step_flops

# For each worker, the function that returns its workload.
TRAINERS = {"ours": "tasks.train", "torch": "peers.train", "torch-compiled": "peers.train"}
DECODERS = {"ours": "tasks.translate", "ctranslate2": "peers.ctranslate2", "hf": "peers.generate"}
# Sentence lengths to compare. Steps have the same number of tokens at every length.
LENGTHS = (128, 256, 512, 1024, 2048)


@contextmanager
def isolated_cache(settings: Settings) -> Iterator[tuple[Settings, Path]]:
    """Yield settings for an empty compilation cache, and the temporary folder that contains it."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        cache = {
            # Use the same cache settings as `transformer_jax.cache`, but with an empty folder.
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
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
    batches: Sequence[Batch] = (),
    again: bool = True,
    work: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Compare the speed of training steps.

    Args:
        name: the name of the benchmark.
        sizes: the dimensions of the model, and of the batch unless `batches` is given.
        settings: the measurement settings.
        only: a comma-separated list of workers.
        usual: the workers to run if `only` is None.
        references: candidates for the reference worker, in order of preference. The first
            candidate that ran becomes the reference.
        batches: batches of real text; each round uses `settings.steps` of them.
        again: whether to start this project's worker a second time at the end, to measure how much
            time the compilation cache saves.
        work: a description of the batches.
    """
    batches = batches or [full_batch(sizes)]
    config = make_config(dataclasses.asdict(sizes)).model
    tokens = sum(map(count_target_tokens, batches))
    flops = sum(step_flops(config, sizes.vocab, batch) for batch in batches) / tokens
    with isolated_cache(settings) as (inside, folder):
        task = {
            "sizes": dataclasses.asdict(sizes),
            "arrays": save_batches(folder / "work.npz", batches),
        }
        specs = {
            key: inside.describe_worker(
                key, TRAINERS[key], {"is_compiled": key == "torch-compiled", **task}
            )
            for key in select_names(only, TRAINERS, usual)
        }
        result = summarize(
            run_rounds(list(specs.values()), inside),
            name,
            unit="target tokens",
            work={"steps": settings.steps, **task["sizes"], **(work or {})},
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


def sweep(name: str, config: Config, settings: Settings, seeds: Sequence[int]) -> Benchmark:
    """Measure whole sweeps of one row with different numbers of seeds, from start to scores.

    The first call starts with an empty compilation cache, and the rounds start with a warm cache.
    Each speed is relative to the first number of seeds.
    """
    with isolated_cache(settings) as (inside, _):
        specs = [
            inside.describe_worker(
                f"{count} seeds", "tasks.sweep", {"config": config.to_dict(), "seeds": count}
            )
            for count in seeds
        ]
        rounds = run_rounds(specs, inside)
    work = {"steps": config.train.steps, "data.batch_tokens": config.data.batch_tokens}
    return summarize(
        rounds, name, unit="target tokens", work=work, references=(f"{seeds[0]} seeds",)
    )


def pipeline(config: Config, settings: Settings) -> Benchmark:
    """Compare training on a config's text with training on preloaded full batches.

    Both workers run the same compiled training steps on the same shapes in the same order. The
    speed ratio shows the combined cost of padding and of gathering batches. To exclude the cost of
    padding, divide the speed ratio by the fraction of positions that are tokens (the density).
    """
    with isolated_cache(settings) as (inside, _):
        steps = settings.rounds * settings.steps
        task = {"config": config.to_dict(), "steps": steps}
        specs = [
            inside.describe_worker(
                key, "tasks.pipeline", {**task, "is_preloaded": key == "preloaded"}
            )
            for key in ("pipeline", "preloaded")
        ]
        rounds = run_rounds(specs, inside)
    work = {
        "steps": settings.steps,
        "rounds": settings.rounds,
        **{f"model.{k}": v for k, v in config.to_dict()["model"].items()},
        "data.corpus": config.data.corpus,
        "data.batch_tokens": config.data.batch_tokens,
    }
    notes = list[str]()
    if "pipeline" in rounds.workers:
        facts = rounds.workers["pipeline"].startup.facts
        notes.append(
            f"An epoch has {facts['batches_per_epoch']} batches of {facts['shapes']} shapes, and "
            f"{facts['density']:.1%} of positions are tokens. Compiling all shapes took "
            f"{facts['compile_seconds']:.1f} s, and the second process loaded them from the cache."
        )
    return summarize(
        rounds, "input", unit="target tokens", work=work, references=("preloaded",), notes=notes
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
            flops[length] = step_flops(make_config(data).model, some.vocab, batch)
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
