"""The `compile` command, which checks whether a model fits on devices without using them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from transformer_jax.commands.base import FileCommand
from transformer_jax.compilation.environment import configure_environment
from transformer_jax.compilation.targets import GIB, KINDS, Target, parse_target
from transformer_jax.config import Config, Row, loading
from transformer_jax.console import progress_bar, stdout
from transformer_jax.errors import OutOfMemoryError, Setting, UsageError

if TYPE_CHECKING:
    from transformer_jax.compilation.fit import Check
    from transformer_jax.compilation.programs import StepProgram


@dataclass(frozen=True)
class Compile(FileCommand):
    """Compile the training step for TPUs or GPUs that this machine does not have.

    The command prints the collectives in a step and the memory that each device needs. The command
    does not predict the duration of a step. The exit code is 71 if the step does not fit in memory.
    """

    target: Annotated[tuple[str, ...], arg(metavar="TARGET...")] = ()
    """The devices (required), such as v5e:2x4 (a TPU slice), h100:8 (eight GPUs), or h200 (one
    GPU)."""
    parallelism: Annotated[
        tuple[Literal["data", "fsdp", "pmap"], ...], arg(metavar="{data,fsdp,pmap}...")
    ] = ()
    """Compile with each of these values of train.parallelism. Default: the config's value."""
    largest: FlagCreatePairsOff[bool] = False
    """Compile only the batch shape that needs the most memory."""
    fit: FlagCreatePairsOff[bool] = False
    """Find the largest data.batch_tokens that fits in memory, to within 5%."""
    prepare: FlagCreatePairsOff[bool] = False
    """Prepare the config's text, and compile the step for the resulting batch shapes. By default,
    compile the step for full batches of sentences with 16, 32, ..., and data.max_length tokens."""
    json: FlagCreatePairsOff[bool] = False
    """Print the results as JSON."""

    def run(self, rows: dict[str, Row]) -> None:
        targets = [parse_target(target) for target in self.target]
        if not targets:
            raise UsageError(
                f"compile needs --target, such as --target v5e:2x4 (available: {', '.join(KINDS)})"
            )
        if self.fit and self.largest:
            raise UsageError("--fit compiles only the largest batches: leave out --largest")
        configure_environment(for_gpus=not all(target.is_tpu for target in targets))
        name = loading.run_name(self.file)
        checks: list[Check] = []
        for check in self._checks(next(iter(rows.values())).config, targets):
            checks.append(check)
            if not self.json:
                print_check(name, check)
        if self.json:
            stdout.print(json.dumps([check.to_dict() for check in checks]))
        parts: list[str | Setting] = []
        for check in checks:
            if not check.fits:
                parts += [*(["; "] if parts else []), *describe_failure(name, check)]
        if parts:
            raise OutOfMemoryError(*parts)

    def _checks(self, config: Config, targets: list[Target]) -> Iterator["Check"]:
        from transformer_jax.compilation.fit import check_shapes, find_batch
        from transformer_jax.compilation.programs import check_attention
        from transformer_jax.compilation.shapes import assume_shapes, prepare_shapes
        from transformer_jax.compilation.topologies import make_devices

        for target in targets:
            check_attention(config, target)
        devices = {target: make_devices(target) for target in targets}
        with progress_bar():
            prepared = prepare_shapes(config) if self.prepare else None
        shapes = prepared or assume_shapes(config)
        check_one = find_batch if self.fit else partial(check_shapes, only_largest=self.largest)
        for target in targets:
            for value in self.parallelism or (config.train.parallelism,):
                changed = shapes.config.change(train={"parallelism": value})
                arguments = (shapes._replace(config=changed), target, devices[target])
                with progress_bar():
                    check = check_one(*arguments)
                yield check


def print_check(name: str, check: "Check") -> None:
    """Print a target's programs and, if all of them fit in memory, the highest peak memory."""
    target = check.target
    devices = "1 device" if target.num_devices == 1 else f"{target.num_devices} devices"
    hosts = f" on {target.num_hosts} hosts" if target.num_hosts > 1 else ""
    memory = _format_bytes(target.capacity)
    stdout.print(f"{target}: {devices}{hosts} with {memory} each, {check.parallelism}")
    stdout.print(f"  {check.shapes}; all numbers are per device")
    for program in check.programs:
        print_program(program)
    if not check.fits:
        return
    peak = f"{_format_bytes(check.largest.peak_bytes)} of {memory} per device"
    place = f"{target} ({check.parallelism})"
    limit = "" if check.batch_tokens is None else f" up to data.batch_tokens {check.batch_tokens}"
    stdout.print(f"{name} fits {place}{limit}: {peak}")


def print_program(program: "StepProgram") -> None:
    """Print a program's memory use and its collectives."""
    flops = _format_flops(program.model_flops)
    if program.program_flops is not None:
        flops += f" ({_format_flops(program.program_flops)} in the program)"
    share, state_share = "", ""
    if program.peak_bytes:
        share = f" ({program.peak_bytes / program.capacity_bytes:.0%})"
        state_share = f" ({program.state_bytes / program.peak_bytes:.0%} of it)"
    stdout.print(
        f"  {program.shape} tokens: peak {_format_bytes(program.peak_bytes)}{share}, "
        f"state {_format_bytes(program.state_bytes)}{state_share}"
    )
    stdout.print(f"    {flops}, compiled in {program.seconds:.0f} s")
    for collectives in program.collectives:
        stdout.print(
            f"    {collectives.kind} {collectives.dtype}: {collectives.count:,}, "
            f"{_format_bytes(collectives.bytes)} in total"
        )


def describe_failure(name: str, check: "Check") -> list[str | Setting]:
    """Return the parts of an error message: what does not fit in memory and which settings help."""
    place = f"{check.target} ({check.parallelism})"
    if not check.programs:
        return [f"{name} does not fit {place} with any data.batch_tokens"]
    worst = check.largest
    parts: list[str | Setting] = [
        f"{name} does not fit {place}: a batch of {worst.shape} tokens needs "
        f"{_format_bytes(worst.peak_bytes)} of {_format_bytes(worst.capacity_bytes)} per device"
    ]
    for i, suggestion in enumerate(check.suggestions):
        parts.append(" or with " if i else "; it fits with ")
        for j, setting in enumerate(suggestion.settings):
            parts += [*([" "] if j else []), setting]
        parts.append(f" ({_format_bytes(suggestion.program.peak_bytes)})")
    if not check.suggestions:
        parts += [
            "; remat, gradient accumulation, and fsdp are not enough: use more devices, or find a "
            "smaller batch with ",
            Setting("fit", value=True),
        ]
    return parts


def _format_bytes(size: float | None) -> str:
    if size is None:
        return "an unknown size"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.2f} MiB"


def _format_flops(flops: float) -> str:
    return f"{flops / 1e12:.2f} TFLOP" if flops >= 1e12 else f"{flops / 1e9:.2f} GFLOP"
