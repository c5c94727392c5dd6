"""What is measured: training, decoding, the input pipeline, and how cost grows with length."""

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.benchmark.adapter import make_config
from experiments.benchmark.results import Benchmark, summarize
from experiments.benchmark.rounds import Rounds, WorkerSpec, quartiles, run_rounds
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

TRAINERS = ("ours", "torch", "torch-compiled")
DECODERS = ("ours", "ctranslate2", "hf")
# Longest sides of equal work, and target tokens in each step of it.
LENGTHS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Settings:
    """How to measure, whatever it is."""

    rounds: int = 9
    steps: int = 1
    """Of each turn."""
    torch_python: str = sys.executable
    """The Python that other libraries run in."""
    until: float = float("inf")
    """When to be done, on the clock of `time.monotonic`."""
    at_once: bool = False
    """Whether contestants may start beside one another."""
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Variables of this project's own contestants."""
    say: Callable[[str], None] = lambda _: None

    def run(self, plans: Sequence[WorkerSpec]) -> Rounds:
        """Hold rounds in this way."""
        return run_rounds(
            plans,
            rounds=self.rounds,
            steps=self.steps,
            until=self.until,
            at_once=self.at_once,
            say=self.say,
        )


@contextmanager
def isolated_cache(setting: Settings) -> Iterator[tuple[Settings, Path]]:
    """Give contestants a folder of their own, in which nothing is compiled yet."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        cache = {
            # What `transformer_jax.cache` sets, but in a folder that is empty at first.
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        yield replace(setting, environment={**setting.environment, **cache}), Path(folder)


def select_names(only: str | None, known: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the contestants that a list with commas names.

    Raises:
        UsageError: there is no such contestant.
    """
    names = list(usual) if only is None else [name for name in only.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(
                f"no contestant {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})"
            )
    return list(dict.fromkeys(names))


def train(
    name: str,
    sizes: Sizes,
    setting: Settings,
    *,
    only: str | None = None,
    usual: Sequence[str] = TRAINERS[:2],
    references: Sequence[str] = ("torch", "torch-compiled"),
    batches: Sequence[Batch] = (),
    again: bool = True,
    work: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Compare training steps.

    Args:
        name: of the part.
        sizes: of the model, and of the batch where no others are given.
        setting: how.
        only: contestants, parted by commas.
        usual: those where none are named.
        references: contestants that others are compared with, the first that took part.
        batches: real ones, of which each turn does `setting.steps`.
        again: start this project's contestant once more when all others are gone, to see what the
            cache of compiled programs saves.
        work: what is to be said of the batches.
    """
    batches = batches or [full_batch(sizes)]
    config = make_config(dataclasses.asdict(sizes)).model
    tokens = sum(map(count_target_tokens, batches))
    flops = sum(step_flops(config, sizes.vocab, batch) for batch in batches) / tokens
    with isolated_cache(setting) as (inside, folder):
        task = {
            "sizes": dataclasses.asdict(sizes),
            "arrays": save_batches(folder / "work.npz", batches),
        }
        own = WorkerSpec("ours", {"maker": "adapter.train", **task}, environment=inside.environment)
        plans = {
            "ours": own,
            **{
                peer: WorkerSpec(
                    peer,
                    {"maker": "peers.train", "is_compiled": peer == "torch-compiled", **task},
                    python=setting.torch_python,
                )
                for peer in TRAINERS[1:]
            },
        }
        names = select_names(only, TRAINERS, usual)
        found = summarize(
            inside.run([plans[key] for key in names]),
            name,
            unit="target tokens",
            work={"steps": setting.steps, **task["sizes"], **(work or {})},
            references=references,
            flops=flops,
        )
        if again and "ours" in found.measurements:
            second = replace(inside, rounds=0).run([own]).workers
            if "ours" in second:
                seconds = second["ours"].startup.first_seconds
                ours = replace(found.measurements["ours"], second_start_seconds=seconds)
                return replace(found, measurements={**found.measurements, "ours": ours})
    return found


def decode(
    name: str,
    sizes: Sizes,
    setting: Settings,
    *,
    beam_size: int,
    sources: Sequence[Sequence[int]] = (),
    extra: int = 19,
    count: int = 64,
    length: int = 20,
    only: str | None = None,
    usual: Sequence[str] = DECODERS,
    references: Sequence[str] = ("ctranslate2", "hf"),
) -> Benchmark:
    """Compare the search for translations, all of them with random parameters that never end.

    Args:
        name: of the part.
        sizes: of the model.
        setting: how.
        beam_size: 1 is greedy search.
        sources: pieces of sentences with their ends; drawn where there are none.
        extra: pieces that a translation has more than its source.
        count: of sentences that are drawn.
        length: of each of them, without its end.
        only: contestants, parted by commas.
        usual: those where none are named.
        references: contestants that others are compared with, the first that took part.
    """
    sources = sources or random_sources(sizes, count, length)
    task = {
        "sizes": dataclasses.asdict(sizes),
        "sources": [list(source) for source in sources],
        "beam_size": beam_size,
        "extra": extra,
    }
    makers = {"ctranslate2": "peers.ctranslate2", "hf": "peers.generate"}
    with isolated_cache(setting) as (inside, _):
        own = WorkerSpec(
            "ours", {"maker": "adapter.translate", **task}, environment=inside.environment
        )
        plans = {
            "ours": own,
            **{
                key: WorkerSpec(key, {"maker": maker, **task}, python=setting.torch_python)
                for key, maker in makers.items()
            },
        }
        held = inside.run([plans[key] for key in select_names(only, DECODERS, usual)])
    lengths = [len(source) for source in sources]
    return summarize(
        held,
        name,
        unit="sentences",
        work={
            **{key: task["sizes"][key] for key in ("d_model", "layers", "heads", "d_ff", "vocab")},
            "dtype": sizes.dtype,
            "beam_size": beam_size,
            "extra": extra,
            "sentences": len(sources),
            "pieces": sum(lengths),
        },
        references=references,
        notes=["the last value is the mean length of the translations, ends counted"],
    )


def pipeline(config: Config, setting: Settings) -> Benchmark:
    """Compare training on a config's own text with training on full batches that are at hand.

    Both do the same compiled steps on the same shapes in the same order. So the ratio says what
    padding, gathering and metering cost together; without the part of padding, `fill`, what the
    input costs.
    """
    with isolated_cache(setting) as (inside, _):
        steps = setting.rounds * setting.steps
        task = {"maker": "adapter.pipeline", "config": config.to_dict(), "steps": steps}
        held = inside.run(
            [
                WorkerSpec(key, {**task, "is_kept": key == "kept"}, environment=inside.environment)
                for key in ("pipeline", "kept")
            ]
        )
    work = {
        "steps": setting.steps,
        "rounds": setting.rounds,
        **{f"model.{k}": v for k, v in config.to_dict()["model"].items()},
        "data.corpus": config.data.corpus,
        "data.batch_tokens": config.data.batch_tokens,
    }
    remarks = list[str]()
    if "pipeline" in held.workers:
        facts = held.workers["pipeline"].startup.facts
        remarks.append(
            f"{facts['shapes']} shapes, {facts['batches_per_epoch']} batches an epoch, "
            f"{facts['fill']:.1%} of positions are tokens; all shapes compiled in "
            f"{facts['compile_seconds']:.1f} s, and the second process found them in the cache"
        )
    return summarize(
        held, "input", unit="target tokens", work=work, references=("kept",), notes=remarks
    )


def scaling(sizes: Sizes, setting: Settings, lengths: Sequence[int], tokens: int) -> Benchmark:
    """Compare steps of as many tokens in ever longer sentences."""
    with isolated_cache(setting) as (inside, folder):
        plans, flops = list[WorkerSpec](), dict[int, float]()
        for length in lengths:
            some = replace(sizes, batch=max(1, tokens // length), src=length, tgt=length)
            batch = full_batch(some)
            data = dataclasses.asdict(some)
            flops[length] = step_flops(make_config(data).model, some.vocab, batch)
            task = {"sizes": data, "arrays": save_batches(folder / f"{length}.npz", [batch])}
            plan = WorkerSpec(
                str(length), {"maker": "adapter.train", **task}, environment=inside.environment
            )
            plans.append(plan)
        first = str(lengths[0])
        found = summarize(
            inside.run(plans),
            "scaling",
            unit="target tokens",
            work={**dataclasses.asdict(sizes), "tokens": tokens},
            references=(first,),
        )
    remarks = [
        f"length {length}: {1 / quartiles(found.ratios(str(length))).median:.2f} times the time of "
        f"length {first}, {flops[length] / flops[lengths[0]]:.2f} times the model FLOPs"
        for length in lengths[1:]
        if found.reference == first and str(length) in found.measurements
    ]
    return replace(found, notes=remarks)
