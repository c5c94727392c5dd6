"""Compile training steps to determine how many target devices each row of a sweep needs."""

from collections.abc import Mapping
from itertools import groupby

from transformer_jax.compilation.fit import count_devices
from transformer_jax.compilation.programs import check_attention
from transformer_jax.compilation.shapes import assume_shapes, largest_bucket
from transformer_jax.compilation.targets import Target
from transformer_jax.compilation.topologies import make_devices
from transformer_jax.data.encode import Progress, ignore_progress
from transformer_jax.sweeps.plan import Sweep

# The number of devices that each row needs, or None if the target has too few devices.
Counts = Mapping[str, int | None]


def count_devices_of_rows(
    sweep: Sweep, target: Target, *, progress: Progress = ignore_progress
) -> Counts:
    """Return how many devices each row needs, or None for a row that does not fit on the target.

    The number of devices is a power of two or the target's total number of devices. To find this
    number, the function compiles the step for the row's largest batch shape from `assume_shapes`.

    Raises:
        UsageError: the target does not support a row's attention implementation, or this machine
            lacks the target's compiler or cuDNN.
    """
    for row in sweep.rows.values():
        check_attention(row.config, target)
    devices = make_devices(target)
    counts: dict[str, int | None] = {}
    for name, row in sweep.rows.items():
        progress(f"compiling {name} for {target}", 0, 0)
        bucket = largest_bucket(row.config, assume_shapes(row.config).buckets)
        counts[name] = count_devices(row.config, bucket, target, devices)
    return counts


def describe_counts(counts: Counts, target: Target) -> str:
    """Return a summary, such as "A1 to E need 2 v5e chips each; big needs 4 v5e chips"."""
    unit = f"{target.kind} {target.unit}"
    sentences: list[str] = []
    for count, group in groupby(counts, key=lambda name: counts[name]):
        names = list(group)
        subject = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        if count == 1:
            verb = f"fits one {unit}" if len(names) == 1 else f"fit one {unit} each"
        elif count is None:
            verb = "does not fit" if len(names) == 1 else "do not fit"
            verb += f" {target.num_devices} {unit}{'s' if target.num_devices > 1 else ''}"
        else:
            verb = "needs" if len(names) == 1 else "need"
            verb += f" {count} {unit}s" + (" each" if len(names) > 1 else "")
        sentences.append(f"{subject} {verb}")
    return "; ".join(sentences)
