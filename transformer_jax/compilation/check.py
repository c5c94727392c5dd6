"""Compile a training step, check whether it fits in a target's memory, and suggest changes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax

from transformer_jax import progress
from transformer_jax.compilation.fit import (
    Compiler,
    Suggestion,
    find_largest_batch,
    find_suggestions,
)
from transformer_jax.compilation.programs import StepProgram, compile_step
from transformer_jax.compilation.shapes import Shapes, largest_bucket
from transformer_jax.compilation.targets import Target
from transformer_jax.config import Config
from transformer_jax.data.batches import Bucket
from transformer_jax.files import JsonObject


@dataclass(frozen=True)
class Check:
    """The result of a memory check for one target and one kind of parallelism."""

    target: Target
    parallelism: str
    shapes: str
    """A description of where the batch shapes come from."""
    programs: tuple[StepProgram, ...]
    """One program for each compiled batch shape. `find_batch` stores only the program for the
    largest batch that fits, or no program if no batch fits."""
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
    shapes: Shapes,
    target: Target,
    devices: Sequence[jax.Device],
    *,
    only_largest: bool = False,
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
