"""Everything that a GPU is asked for, by one command, within a few minutes.

In order of importance; what there is no time for is told. Contestants of a part start beside one
another, for compiling takes most of the time: first calls are longer than they would be alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.benchmark.benchmarks import TRAINERS, Settings, decode, train
from experiments.benchmark.results import Benchmark
from experiments.benchmark.rounds import WorkerSpec
from experiments.benchmark.workloads import (
    SIZES,
    Sizes,
    count_target_tokens,
    text_batches,
    text_sources,
)
from transformer_jax.config import Config
from transformer_jax.errors import UsageError

# So that several contestants have room on one device.
SHARE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
# Seconds that a part needs at least to tell anything.
LEAST = 45.0


@dataclass(frozen=True)
class Amount:
    """How much of each is done."""

    base: Sizes
    big: Sizes
    tokens: int
    """Target tokens of a training step, on average at least."""
    batches: int
    """Of each turn."""
    shapes: int
    """Different ones among them."""
    sentences: int
    rounds: int
    trainers: tuple[str, ...]


FULL = Amount(
    base=replace(SIZES["base"], vocab=37_000, dtype="bfloat16"),
    big=replace(SIZES["big"], vocab=37_000, dtype="bfloat16"),
    tokens=25_000,
    batches=8,
    shapes=2,
    sentences=3000,
    rounds=9,
    trainers=TRAINERS,
)
# The embedded corpus in short has a vocabulary of some hundred pieces.
TOY = Amount(
    base=replace(SIZES["toy"], vocab=512, dtype="bfloat16"),
    big=replace(SIZES["toy"], vocab=512, d_model=32, dtype="bfloat16"),
    tokens=200,
    batches=2,
    shapes=1,
    sentences=8,
    rounds=2,
    # Compiling by PyTorch takes minutes on a CPU.
    trainers=TRAINERS[:2],
)


def number_words_config(*, is_toy: bool) -> Config:
    """Return a config of text that is always at hand: lines of one to three number words."""
    pairs, vocab = (300, 200) if is_toy else (60_000, 1000)
    return Config().change(
        data={"num_pairs": pairs, "max_numbers_per_line": 3, "vocab_size": vocab}
    )


def gpu(
    config: Config,
    amount: Amount,
    setting: Settings,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[list[Benchmark], list[str]]:
    """Measure training and decoding; return what was found, and what there was no time for.

    Args:
        config: whose text.
        amount: how much.
        setting: how.
        seconds: that all of it may take.
        say: told of what begins.

    Raises:
        UsageError: the text has too many pieces for the model.
    """
    until = time.monotonic() + seconds
    setting = replace(setting, at_once=True, environment={**setting.environment, **SHARE})
    batches = text_batches(config, amount.tokens, shapes=amount.shapes, count=amount.batches)
    sources = text_sources(config, amount.sentences)
    highest = max(int(side.max()) for batch in batches for side in batch)
    if highest >= amount.base.vocab - 1:
        raise UsageError(
            f"--data must have fewer than {amount.base.vocab - 1} pieces, and this has more than "
            f"{highest}"
        )
    tokens = sum(map(count_target_tokens, batches)) / len(batches)
    filled = sum(int((side != 0).sum()) for b in batches for side in b)
    fill = filled / sum(side.size for b in batches for side in b)
    work = {
        "text": config.data.corpus,
        "target_tokens_a_step": round(tokens),
        "fill": round(fill, 3),
        "shapes": " ".join(sorted({f"{b.source.shape}+{b.target.shape}" for b in batches})),
    }

    def training(sizes: Sizes) -> Callable[[str, Settings], Benchmark]:
        return lambda name, setting: train(
            name,
            sizes,
            replace(setting, steps=len(batches)),
            usual=amount.trainers,
            references=("torch-compiled", "torch"),
            batches=batches,
            again=False,
            work=work,
        )

    # Of the time that is left, how much each may take.
    plan: dict[str, tuple[float, Callable[[str, Settings], Benchmark]]] = {
        "train base": (0.38, training(amount.base)),
        "train big": (0.55, training(amount.big)),
        "decode base, beam 4": (
            1.0,
            lambda name, setting: decode(
                name,
                amount.base,
                replace(setting, steps=1, rounds=min(3, setting.rounds)),
                beam_size=4,
                sources=sources,
                extra=10,
                usual=("ours", "hf"),
                references=("hf",),
            ),
        ),
    }
    parts, left_out = list[Benchmark](), list[str]()
    for name, (share, measure) in plan.items():
        left = until - time.monotonic()
        if left < min(LEAST, seconds / 4):
            left_out.append(f"{name}: {max(left, 0):.0f} s were left")
            continue
        say(f"{name}, at most {left * share:.0f} s")
        begun = replace(setting, until=time.monotonic() + left * share, rounds=amount.rounds)
        parts.append(measure(name, begun))
    return parts, left_out


def check_there_is_one(setting: Settings) -> None:
    """Make sure that JAX finds a device that is no CPU, in a process that is gone afterwards.

    Raises:
        UsageError: it finds none.
    """
    held = replace(setting, rounds=0).run([WorkerSpec("device", {"maker": "adapter.device"})])
    why = held.skipped.get("device")
    if why is None and held.workers["device"].startup.facts["platform"] == "cpu":
        why = "JAX finds a CPU alone"
    if why is not None:
        raise UsageError(f"no GPU is at hand: {why} (--toy tries the command in small)")
