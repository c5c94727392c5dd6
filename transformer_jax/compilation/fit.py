"""Check whether a training step fits in memory, and find a batch size or settings that do."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax

from transformer_jax import progress
from transformer_jax.compilation.programs import StepProgram, compile_step
from transformer_jax.compilation.shapes import Shapes, full_bucket, largest_bucket
from transformer_jax.compilation.targets import Target
from transformer_jax.config import Config
from transformer_jax.config.architectures import uses
from transformer_jax.data.batches import ROW_MULTIPLE, Bucket
from transformer_jax.errors import Setting
from transformer_jax.files import JsonObject

# The bisection in `find_largest_batch` stops when the largest batch size known to fit is at least
# this fraction of the smallest batch size known not to fit.
PRECISION = 0.95
MAX_MICRO_BATCHES = 64
MAX_BATCH_TOKENS = 1 << 26

Compiler = Callable[[Config, Bucket], StepProgram]
"""A function that compiles a step for a target's devices."""


@dataclass(frozen=True)
class Suggestion:
    """Settings that make a step fit in memory, and the program compiled with these settings."""

    settings: tuple[Setting, ...]
    program: StepProgram


@dataclass(frozen=True)
class Check:
    """The result of a memory check for one target and one kind of parallelism."""

    target: Target
    parallelism: str
    shapes: str
    programs: tuple[StepProgram, ...]
    """One program for each compiled batch shape; `find_batch` stores only the largest that fits."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes that make the step fit in memory; empty if it already fits or no change helps."""
    batch_tokens: int | None = None
    """The largest `data.batch_tokens` that fits in memory, if `find_batch` found one."""

    @property
    def fits(self) -> bool:
        """Whether all programs fit in the target's memory; False if there are no programs."""
        return bool(self.programs) and all(program.fits for program in self.programs)

    @property
    def largest(self) -> StepProgram:
        """The program that needs the most memory."""
        return max(self.programs, key=lambda p: (not p.fits, p.peak_bytes or 0))

    def to_dict(self) -> JsonObject:
        """Return the result as JSON-serializable data."""
        return {
            "target": str(self.target),
            "devices": self.target.num_devices,
            "hosts": self.target.num_hosts,
            "parallelism": self.parallelism,
            "shapes": self.shapes,
            "fits": self.fits,
            "batch_tokens": self.batch_tokens,
            "programs": [asdict(program) for program in self.programs],
            "suggestions": [
                {
                    "settings": {setting.name: setting.value for setting in suggestion.settings},
                    "program": asdict(suggestion.program),
                }
                for suggestion in self.suggestions
            ],
        }


def check_shapes(
    shapes: Shapes, target: Target, devices: Sequence[jax.Device], *, only_largest: bool = False
) -> Check:
    """Compile the step for all batch shapes, or only for the one that needs the most memory."""
    config, buckets = shapes.config, shapes.buckets
    compile_one = _compiler(target, devices)
    programs = {
        bucket: compile_one(config, bucket)
        for bucket in ([largest_bucket(config, buckets)] if only_largest else buckets)
    }
    failed = {bucket: program for bucket, program in programs.items() if not program.fits}
    suggestions: list[Suggestion] = []
    if failed:
        bucket = max(failed, key=lambda bucket: failed[bucket].peak_bytes or 0)
        suggestions = find_suggestions(config, bucket, failed[bucket], compile_one, len(devices))
    parallelism, source = config.train.parallelism, shapes.source
    return Check(target, parallelism, source, tuple(programs.values()), tuple(suggestions))


def find_batch(shapes: Shapes, target: Target, devices: Sequence[jax.Device]) -> Check:
    """Find the largest `data.batch_tokens` for which the largest batch shape fits in memory."""
    config = shapes.config
    bucket = largest_bucket(config, shapes.buckets)
    compile_one = _compiler(target, devices)
    largest = find_largest_batch(config, bucket, compile_one, len(devices))
    tokens, programs = (None, ()) if largest is None else (largest[0], (largest[1],))
    parallelism, source = config.train.parallelism, shapes.source
    return Check(target, parallelism, source, programs, batch_tokens=tokens)


def _compiler(target: Target, devices: Sequence[jax.Device]) -> Compiler:
    """Return a compile function for these devices that reports progress before each compilation."""

    def compile_one(config: Config, bucket: Bucket) -> StepProgram:
        shape = f"{bucket.rows} x ({bucket.source} + {bucket.target})"
        options = [config.train.parallelism]
        options += ["remat"] if config.model.remat else []
        if (count := config.train.gradient_accumulation_steps) > 1:
            options.append(f"{count} micro-batches")
        progress.report(f"compiling for {target}, {', '.join(options)}, {shape} tokens")
        return compile_step(config, target, devices, bucket)

    return compile_one


def find_suggestions(
    config: Config, bucket: Bucket, program: StepProgram, compiler: Compiler, num_devices: int
) -> list[Suggestion]:
    """Find each change that makes the step fit or, if there is none, combine all changes."""
    candidates: list[list[tuple[Setting, ...]]] = []
    if uses(config.model, "remat") and not config.model.remat:
        candidates.append([(Setting("model.remat", True),)])
    counts = _micro_batches(config, program, num_devices)
    candidates.append([(Setting("train.gradient_accumulation_steps", count),) for count in counts])
    if num_devices > 1 and config.train.parallelism != "fsdp":
        candidates.append([(Setting("train.parallelism", "fsdp"),)])
    found = [_first_fit(config, bucket, options, compiler) for options in candidates]
    suggestions = list(filter(None, found))
    # If no single option is enough, combine the last (strongest) value of each option.
    strongest = [options[-1] for options in candidates if options]
    if not suggestions and len(strongest) > 1:
        combined = tuple(itertools.chain.from_iterable(strongest))
        suggestions = list(filter(None, [_first_fit(config, bucket, [combined], compiler)]))
    return suggestions


def find_largest_batch(
    config: Config, bucket: Bucket, compiler: Compiler, num_devices: int
) -> tuple[int, StepProgram] | None:
    """Find the largest `data.batch_tokens` for which full batches of this bucket fit in memory.

    Return the number of tokens and the program, or None if no batch fits. The number is within 5%
    or lcm(`ROW_MULTIPLE`, `num_devices`) rows of the largest one that fits.
    """
    width = max(bucket.source, bucket.target)
    # The number of rows must be a multiple of this number.
    unit = math.lcm(ROW_MULTIPLE, num_devices)
    programs: dict[int, StepProgram] = {}

    def compile_and_check(units: int) -> bool:
        tokens = units * unit * width
        programs[units] = compiler(config, full_bucket(bucket, tokens))
        return programs[units].fits

    low, high = 0, 0
    trial = max(1, config.data.batch_tokens // (unit * width))
    while not high and trial * unit * width <= MAX_BATCH_TOKENS:
        if compile_and_check(trial):
            low, trial = trial, 2 * trial
        else:
            high = trial
    while high and high - low > 1 and low < PRECISION * high:
        middle = (low + high) // 2
        low, high = (middle, high) if compile_and_check(middle) else (low, middle)
    return (low * unit * width, programs[low]) if low else None


def count_devices(
    config: Config, bucket: Bucket, target: Target, devices: Sequence[jax.Device]
) -> int | None:
    """Return how many devices (1, 2, 4, ..., or all) the step needs, or None if it never fits."""
    powers = [1 << i for i in range(len(devices).bit_length())]
    # The total number of devices might not be a power of two.
    for count in dict.fromkeys([*powers, len(devices)]):
        if compile_step(config, target, devices[:count], bucket).fits:
            return count
    return None


def _first_fit(
    config: Config, bucket: Bucket, options: Sequence[tuple[Setting, ...]], compiler: Compiler
) -> Suggestion | None:
    for settings in options:
        changed = config.with_fields({setting.name: setting.value for setting in settings})
        program = compiler(changed, bucket)
        if program.fits:
            return Suggestion(settings, program)
    return None


def _micro_batches(config: Config, program: StepProgram, num_devices: int) -> list[int]:
    """Return numbers of micro-batches to try: powers of two that may be enough, and the maximum."""
    current = config.train.gradient_accumulation_steps
    most = min(MAX_MICRO_BATCHES, program.rows // num_devices)
    counts = [count for i in range(1, 17) if current < (count := 1 << i) <= most]
    if program.peak_bytes is None:
        return counts
    # Smaller micro-batches do not shrink the training state or the gradient sum, which is as large
    # as the parameters. With fsdp, each device holds only a part of the state, but it gathers all
    # parameters and computes all gradients.
    num_copies = 2 * num_devices if config.train.parallelism == "fsdp" else 1
    fixed = program.state_bytes + num_copies * program.parameter_bytes
    activations = (program.peak_bytes - fixed) * current
    enough = [n for n in counts if fixed + activations / n <= program.capacity_bytes]
    # The memory estimate can be too low, so also try the maximum number of micro-batches, which can
    # also help in combination with other changes.
    return list(dict.fromkeys([*enough[:3], *counts[-1:]]))
