"""Run all GPU benchmarks with one command that takes only a few minutes.

Benchmarks run in order of importance, and the result lists the benchmarks that were skipped for
lack of time. The workers of a benchmark compile their programs at the same time, so their first
calls take longer than usual.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.benchmark.benchmarks import TRAINERS, decode, train
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

# Workers share one device, so each worker may use only part of the device's memory.
SHARE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
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


FULL = Amount(
    base=replace(SIZES["base"], vocab=37_000, dtype="bfloat16"),
    big=replace(SIZES["big"], vocab=37_000, dtype="bfloat16"),
    tokens=25_000,
    batches=8,
    shapes=2,
    sentences=3000,
    trainers=tuple(TRAINERS),
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
)


def number_words_config(*, is_toy: bool) -> Config:
    """Return a config that uses synthetic text: each line is one to three spelled-out numbers."""
    pairs, vocab = (300, 200) if is_toy else (60_000, 1000)
    return Config().change(
        data={"num_pairs": pairs, "max_numbers_per_line": 3, "vocab_size": vocab}
    )


def gpu(
    config: Config, amount: Amount, settings: Settings, *, seconds: float
) -> tuple[list[Benchmark], list[str]]:
    """Measure the speed of training and decoding; return the results and the skipped benchmarks.

    Args:
        config: the config that specifies the text.
        amount: the amount of work to do.
        settings: the measurement settings.
        seconds: the time limit.

    Raises:
        UsageError: the text's vocabulary is too large for the model.
    """
    until = time.monotonic() + seconds
    settings = replace(settings, at_once=True, environment={**settings.environment, **SHARE})
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
        "train big": (0.55, training(amount.big)),
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
    benchmarks, skipped = list[Benchmark](), list[str]()
    for name, (share, measure) in plan.items():
        left = until - time.monotonic()
        if left < min(LEAST, seconds / 4):
            skipped.append(f"{name}: {max(left, 0):.0f} s left")
            continue
        settings.say(f"{name}, at most {left * share:.0f} s")
        begun = replace(settings, until=time.monotonic() + left * share)
        benchmarks.append(measure(name, begun))
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
