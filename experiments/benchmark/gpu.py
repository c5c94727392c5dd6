"""Run all GPU benchmarks with one command that takes only a few minutes.

Benchmarks run in order of importance, and the result lists the benchmarks that were skipped for
lack of time. Only one worker runs at a time, so each has the whole device and its memory, and the
duration of its first call shows the cost of compilation.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments.benchmark.benchmarks import TRAINERS, decode, sweep, train
from experiments.benchmark.measurements import Benchmark
from experiments.benchmark.rounds import Settings, WorkerSpec, run_rounds
from experiments.benchmark.workloads import (
    SIZES,
    Sizes,
    count_target_tokens,
    text_batches,
    text_sources,
)
from transformer_jax.config import Config
from transformer_jax.errors import UsageError

# Skip a benchmark if fewer than this many seconds, and less than a quarter of the time limit,
# remain.
LEAST = 45.0


@dataclass(frozen=True)
class Amount:
    """The amount of work that the benchmarks do."""

    base: Sizes
    big: Sizes
    tokens: int
    """The minimum average number of target tokens per training step."""
    batches: int
    """Batches per round."""
    shapes: int
    """The maximum number of distinct shapes among the batches."""
    sentences: int
    trainers: tuple[str, ...]
    sweep_steps: int
    """Training steps per run of a sweep."""
    seeds: tuple[int, ...]
    """The numbers of seeds for which a sweep is measured."""


FULL = Amount(
    base=replace(SIZES["base"], vocab=37_000, dtype="bfloat16"),
    big=replace(SIZES["big"], vocab=37_000, dtype="bfloat16"),
    tokens=25_000,
    batches=8,
    shapes=2,
    sentences=3000,
    trainers=tuple(TRAINERS),
    sweep_steps=1000,
    seeds=(1, 3, 8),
)
# The vocabulary of the short number-word corpus has fewer than 512 tokens.
TOY = Amount(
    base=replace(SIZES["toy"], vocab=512, dtype="bfloat16"),
    big=replace(SIZES["toy"], vocab=512, d_model=32, dtype="bfloat16"),
    tokens=200,
    batches=2,
    shapes=1,
    sentences=8,
    # torch.compile takes minutes on a CPU.
    trainers=("ours", "torch"),
    sweep_steps=2,
    seeds=(1,),
)


def number_words_config(*, is_toy: bool) -> Config:
    """Return a config that uses synthetic text: each line is one to three spelled-out numbers."""
    pairs, vocab = (300, 200) if is_toy else (60_000, 1000)
    # An untrained model rarely ends a sentence, so searches usually run up to the limit.
    decode = {"beam_size": 1, "max_extra_length": 1} if is_toy else {}
    return Config().change(
        data={"num_pairs": pairs, "max_numbers_per_line": 3, "vocab_size": vocab}, decode=decode
    )


def sweep_config(config: Config, steps: int) -> Config:
    """Return the config of a sweep: small models, and batches as in `table3_multi30k`."""
    return config.change(
        model={
            "num_layers": 2,
            "d_model": 128,
            "d_ff": 512,
            "num_heads": 4,
            "d_k": 32,
            "d_v": 32,
        },
        data={"batch_tokens": 1024},
        train={"steps": steps, "checkpoint_every": steps, "log_every": max(1, steps // 4)},
    )


def gpu(
    config: Config,
    amount: Amount,
    settings: Settings,
    *,
    seconds: float,
    store: Callable[[Sequence[Benchmark]], object] = lambda _: None,
    earlier: Sequence[Benchmark] = (),
) -> tuple[list[Benchmark], list[str]]:
    """Measure training, decoding, and sweeps; return the results and the skipped benchmarks.

    Args:
        config: the config that specifies the text.
        amount: the amount of work to do.
        settings: the measurement settings.
        seconds: the time limit.
        store: a function that receives all results so far after each benchmark.
        earlier: results that are already known.

    Raises:
        UsageError: the text's vocabulary is too large for the model.
    """
    until = time.monotonic() + seconds
    settings = replace(settings, alone=True)
    batches = text_batches(config, amount.tokens, shapes=amount.shapes, count=amount.batches)
    sources = text_sources(config, amount.sentences)
    highest = max(int(side.max()) for batch in batches for side in batch)
    if highest >= amount.base.vocab - 1:
        raise UsageError(
            f"--data must have fewer than {amount.base.vocab - 1} tokens, and this text has more "
            f"than {highest}"
        )
    tokens = sum(map(count_target_tokens, batches)) / len(batches)
    filled = sum(int((side != 0).sum()) for b in batches for side in b)
    density = filled / sum(side.size for b in batches for side in b)
    work = {
        "text": config.data.corpus,
        "target_tokens_a_step": round(tokens),
        "density": round(density, 3),
        "shapes": " ".join(sorted({f"{b.source.shape}+{b.target.shape}" for b in batches})),
    }

    def training(sizes: Sizes) -> Callable[[str, Settings], Benchmark]:
        return lambda name, settings: train(
            name,
            sizes,
            replace(settings, steps=len(batches)),
            usual=amount.trainers,
            references=("torch-compiled", "torch"),
            batches=batches,
            again=False,
            work=work,
        )

    # Each number is the fraction of the remaining time that the benchmark may take.
    plan: dict[str, tuple[float, Callable[[str, Settings], Benchmark]]] = {
        "train base": (0.38, training(amount.base)),
        "train big": (0.45, training(amount.big)),
        "sweep": (
            0.6,
            lambda name, settings: sweep(
                name,
                sweep_config(config, amount.sweep_steps),
                replace(settings, steps=1, rounds=1),
                amount.seeds,
            ),
        ),
        "decode base, beam 4": (
            1.0,
            lambda name, settings: decode(
                name,
                amount.base,
                replace(settings, steps=1, rounds=min(3, settings.rounds)),
                beam_size=4,
                sources=sources,
                extra=10,
                usual=("ours", "hf"),
                references=("hf",),
            ),
        ),
    }
    benchmarks, skipped = list(earlier), list[str]()
    known = {part.name for part in earlier}
    for name, (share, measure) in plan.items():
        if name in known:
            continue
        left = until - time.monotonic()
        if left < min(LEAST, seconds / 4):
            skipped.append(f"{name}: {max(left, 0):.0f} s left")
            continue
        settings.say(f"{name}, at most {left * share:.0f} s")
        begun = replace(settings, until=time.monotonic() + left * share)
        benchmarks.append(measure(name, begun))
        store(benchmarks)
    return benchmarks, skipped


def check_gpu_is_available(settings: Settings) -> None:
    """Check in a separate process that JAX finds an accelerator.

    Raises:
        UsageError: JAX finds only a CPU or cannot be started.
    """
    spec = WorkerSpec("device", {"maker": "tasks.report_device"})
    outcome = run_rounds([spec], replace(settings, rounds=0))
    why = outcome.skipped.get("device")
    if why is None and outcome.workers["device"].startup.facts["platform"] == "cpu":
        why = "JAX finds only a CPU"
    if why is not None:
        raise UsageError(f"no GPU found: {why} (--toy tries the command at toy size)")
