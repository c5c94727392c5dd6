"""Measure everything that needs a GPU with one command, which can be resumed later.

Benchmarks run in order of importance, and the result lists the benchmarks that were skipped or that
failed. Only one worker runs at a time, so each has the whole device and its memory, and the
duration of its first call shows the cost of compilation.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.benchmark.benchmarks import TRAINERS, Variant, decode, loop, train
from experiments.benchmark.commands import run, sweep
from experiments.benchmark.measurements import Benchmark
from experiments.benchmark.rounds import Settings, WorkerFailedError, WorkerSpec, run_rounds
from experiments.benchmark.workloads import SIZES, Sizes, text_sources
from transformer_jax.config import Config
from transformer_jax.config.loading import load_config, load_rows
from transformer_jax.errors import UsageError

# A benchmark is skipped if the remaining time is less than the time that it needs and less than
# this share of the time limit.
MAX_SHARE = 0.75
ANY_ORDER = Variant(flags="--xla_gpu_deterministic_ops=false")
TRITON = Variant(flags="--xla_gpu_enable_triton_gemm=true")
# XLA compiles each fusion twice to choose the faster kernel, but not if results must be
# deterministic.
NO_FUSION_AUTOTUNER = Variant(
    flags=f"{ANY_ORDER.flags} --xla_gpu_experimental_enable_fusion_autotuner=false"
)
# Changes to the base model, in which attention dropout is 0.1, as in the other libraries.
VARIANTS = {
    "paper": Variant({"model": {"attention_dropout": 0.0}}),
    "cudnn": Variant({"model": {"attention_dropout": 0.0, "attention_implementation": "cudnn"}}),
    "no dropout": Variant({"model": {"attention_dropout": 0.0, "dropout": 0.0}}),
    "bfloat16 logits": Variant({"model": {"logits_dtype": "bfloat16"}}),
    "any order of sums": ANY_ORDER,
    "triton": TRITON,
}


@dataclass(frozen=True)
class Amount:
    """The amount of work that the benchmarks do."""

    base: Sizes
    big: Sizes
    recipe: Sizes
    row: Sizes
    """A row of `table3_multi30k`, with a batch of 1,024 tokens."""
    variants: Mapping[str, Variant]
    groups: Sequence[int]
    """The group sizes to measure: the numbers of runs in one program."""
    trainers: Sequence[str]
    steps: int
    """The number of steps per round."""
    sentences: int
    rows: Mapping[str, Config]
    """The rows in a sweep."""
    seeds: int
    run: Config
    """The config of a run."""


def full_amount() -> Amount:
    """Return the amount of work for a GPU.

    The text is Multi30k if the environment variable TRANSFORMER_JAX_DATA is set. Otherwise, it
    consists of the same number of lines with numbers written as words.
    """
    recipe = load_config("multi30k").change(train={"steps": 1000}, data={"max_batch_shapes": None})
    rows = {name: row.config for name, row in load_rows("table3_multi30k").items()}
    if "TRANSFORMER_JAX_DATA" not in os.environ:
        recipe = with_number_words(recipe, vocab_size=1000)
        rows = {name: with_number_words(row, vocab_size=1000) for name, row in rows.items()}
    small = Sizes(d_model=128, layers=4, heads=4, d_ff=256, vocab=9712, batch=288, src=23, tgt=24)
    full = {"vocab": 37_000, "batch": 512, "src": 48, "tgt": 48, "dtype": "bfloat16"}
    return Amount(
        base=replace(SIZES["base"], **full),
        big=replace(SIZES["big"], **full),
        recipe=small,
        row=replace(small, layers=2, heads=8, vocab=2000, batch=40),
        variants=VARIANTS,
        groups=(1, 3, 8, 16),
        trainers=tuple(TRAINERS),
        steps=10,
        sentences=3000,
        rows=rows,
        seeds=3,
        run=recipe,
    )


def toy_amount() -> Amount:
    """Return an amount of work that a CPU can do in a minute."""
    # The tokens of the text must be in the vocabulary.
    toy = replace(SIZES["toy"], vocab=200)
    small = Config().change(
        model={"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "d_k": 8, "d_v": 8},
        data={"num_pairs": 300, "vocab_size": 200, "batch_tokens": 512, "max_batch_shapes": 1},
        train={"steps": 4, "checkpoint_every": 4, "checkpoint_unit": "step", "log_every": 2},
        # An untrained model rarely ends a sentence, so searches usually run up to the limit.
        decode={"beam_size": 1, "max_extra_length": 1, "average_checkpoints": 1},
    )
    small = with_number_words(small)
    return Amount(
        base=replace(toy, dtype="bfloat16"),
        big=replace(toy, d_model=32, dtype="bfloat16"),
        recipe=toy,
        row=toy,
        variants={"paper": VARIANTS["paper"]},
        groups=(1, 2),
        # torch.compile takes minutes on a CPU.
        trainers=("ours", "torch"),
        steps=2,
        sentences=8,
        rows={"base": small, "D1": small.change(model={"dropout": 0.0})},
        seeds=1,
        run=small,
    )


def with_number_words(config: Config, **data: int) -> Config:
    """Return a config that uses synthetic text: each line is one to three spelled-out numbers."""
    names = ("num_pairs", "vocab_size", "batch_tokens", "max_batch_shapes", "max_length")
    kept = {name: getattr(config.data, name) for name in names}
    text = {**Config().to_dict()["data"], **kept, "max_numbers_per_line": 3, **data}
    return config.change(data=text)


def gpu(
    amount: Amount,
    settings: Settings,
    *,
    seconds: float,
    folder: Path,
    store: Callable[[Sequence[Benchmark]], object] = lambda _: None,
    earlier: Sequence[Benchmark] = (),
) -> tuple[list[Benchmark], list[str]]:
    """Run all benchmarks; return the results and the skipped benchmarks.

    Args:
        amount: the amount of work to do.
        settings: the measurement settings.
        seconds: the time limit.
        folder: the sweep's folder. A later call with the same folder continues the sweep.
        store: a function that receives all results so far after each benchmark.
        earlier: results that are already known.
    """
    until = time.monotonic() + seconds
    settings = replace(settings, alone=True, steps=amount.steps, until=until)
    benchmarks, skipped = list(earlier), list[str]()
    known = {part.name for part in earlier}
    for name, (needed, measure) in _plan(amount, folder).items():
        if name in known:
            continue
        left = until - time.monotonic()
        if left < min(needed, MAX_SHARE * seconds):
            skipped.append(f"{name}: {max(left, 0):.0f} of about {needed} s left")
            continue
        settings.say(f"{name}, about {needed} s")
        try:
            part = measure(name, settings)
        except WorkerFailedError as why:
            skipped.append(f"{name}: {why}")
            continue
        if part.measurements:
            benchmarks.append(part)
            store(benchmarks)
        else:
            reasons = (f"{worker}: {why}" for worker, why in part.skipped.items())
            skipped.append(f"{name}: {'; '.join(reasons)}")
    return benchmarks, skipped


def _plan(
    amount: Amount, folder: Path
) -> dict[str, tuple[int, Callable[[str, Settings], Benchmark]]]:
    """Return each benchmark in order of importance, with the seconds that it needs on an H100."""

    def steps(
        sizes: Sizes, trainers: Sequence[str], variants: Mapping[str, Variant]
    ) -> Callable[[str, Settings], Benchmark]:
        return lambda name, settings: train(
            name,
            sizes,
            settings,
            usual=trainers,
            references=("torch-compiled", "torch", "ours", "1 runs"),
            variants=variants,
            again=False,
        )

    groups = {f"{count} runs": Variant(num_runs=count) for count in amount.groups}
    compiled = [name for name in amount.trainers if name != "torch"]
    flags = {"any order": ANY_ORDER, "no fusion autotuner": NO_FUSION_AUTOTUNER}
    return {
        "run": (120, lambda name, settings: run(name, amount.run, settings)),
        "train base": (240, steps(amount.base, amount.trainers, {})),
        "train recipe": (200, steps(amount.recipe, amount.trainers, flags)),
        "groups": (180, steps(amount.row, (), groups)),
        "loop": (120, lambda name, settings: loop(name, amount.run, settings)),
        "variants of base": (310, steps(amount.base, ["ours"], amount.variants)),
        "train big": (200, steps(amount.big, compiled, {"paper": VARIANTS["paper"]})),
        "decode base, beam 4": (
            120,
            lambda name, settings: decode(
                name,
                amount.base,
                replace(settings, steps=1, rounds=min(3, settings.rounds)),
                beam_size=4,
                sources=text_sources(amount.run, amount.sentences),
                extra=10,
                usual=("ours", "hf"),
                references=("hf",),
            ),
        ),
        # A later call continues the sweep, so any amount of time is enough.
        "sweep": (
            100,
            lambda name, settings: sweep(name, amount.rows, amount.seeds, settings, folder),
        ),
    }


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
