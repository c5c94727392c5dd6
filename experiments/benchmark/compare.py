"""Compare two benchmark results, and show which changes exceed the variation between rounds."""

import itertools
from collections.abc import Sequence

from experiments.benchmark.measurements import Benchmark, Measurement
from experiments.benchmark.results import Results, format_quartiles
from experiments.benchmark.rounds import Quartiles, quartiles
from transformer_jax.errors import UsageError
from transformer_jax.reports.tables import to_markdown

HEAD = ("part", "worker", "measure", "before", "after", "after / before", "middle half", "")


def all_ratios(before: Sequence[float], after: Sequence[float]) -> Quartiles:
    """Return the median and quartiles of the ratio after / before over all pairs of values.

    The rounds of the two results are not paired, so all combinations have equal weight.
    """
    return quartiles([a / b for a, b in itertools.product(after, before)])


def describe_change(ratio: Quartiles) -> str:
    """Describe a speed ratio in words."""
    if ratio.low <= 1 <= ratio.high:
        return "within the spread"
    return "faster" if ratio.low > 1 else "slower"


def compare(before: Results, after: Results) -> str:
    """Return a table of the workers in both results, and notes about any other differences.

    If both results have the same reference worker, the table compares the other workers' speeds
    relative to this worker, because other load on the machine affects relative speeds less than
    absolute speeds. For all other workers, the table compares absolute speeds.

    Raises:
        UsageError: the results have no comparable worker in common.
    """
    lines: list[list[str]] = []
    notes: list[str] = []
    parts = {part.name: part for part in before.benchmarks}
    for later in after.benchmarks:
        earlier = parts.pop(later.name, None)
        if earlier is None:
            notes.append(f"{later.name}: only after")
            continue
        changed = [
            f"{key} {earlier.work.get(key)} -> {later.work.get(key)}"
            for key in sorted({*earlier.work, *later.work})
            if earlier.work.get(key) != later.work.get(key)
        ]
        if changed:
            notes.append(f"{later.name}: different work ({', '.join(changed)}), not compared")
            continue
        lines += _compare_benchmark(earlier, later)
        for name in sorted({*earlier.measurements} ^ {*later.measurements}):
            when = "after" if name in later.measurements else "before"
            notes.append(f"{later.name}, {name}: only {when}")
    notes += [f"{name}: only before" for name in parts]
    for key, value in before.machine.items():
        if after.machine.get(key) != value:
            notes.append(f"different machine: {key} {value} -> {after.machine.get(key)}")
    if not lines:
        raise UsageError(f"nothing to compare: {'; '.join(notes) or 'no benchmarks'}")
    table = to_markdown([HEAD, *lines], align=True)
    return "\n\n".join([table, *(["\n".join(f"- {x}" for x in notes)] if notes else [])])


def _compare_benchmark(earlier: Benchmark, later: Benchmark) -> list[list[str]]:
    reference = later.reference if later.reference == earlier.reference else None
    lines = list[list[str]]()
    for name in later.measurements:
        if name not in earlier.measurements:
            continue
        if reference in (None, name):
            what = f"{later.unit} per second"
            both = [part.measurements[name].speeds for part in (earlier, later)]
        else:
            what = f"speed relative to {reference}"
            both = [part.ratios(name) for part in (earlier, later)]
        ratio = all_ratios(*both)
        values = [f"{quartiles(x).median:.4g}" for x in both]
        lines.append(
            [later.name, name, what, *values, _ratio(ratio.median), format_quartiles(ratio)]
        )
        lines[-1].append(describe_change(ratio))
        lines += _compare_single_values(
            later.name, name, earlier.measurements[name], later.measurements[name]
        )
    return lines


def _compare_single_values(
    part: str, name: str, earlier: Measurement, later: Measurement
) -> list[list[str]]:
    """Compare values that were measured only once and therefore have no spread."""
    kinds = {
        "first call, s": [one.first_seconds for one in (earlier, later)],
        "second start, s": [one.second_start_seconds for one in (earlier, later)],
        "peak GiB": [
            max(sample.peak_bytes for sample in one.samples) / (1 << 30) for one in (earlier, later)
        ],
    }
    lines = list[list[str]]()
    for what, (before, after) in kinds.items():
        if before is not None and after is not None:
            values = [f"{before:.4g}", f"{after:.4g}", _ratio(after / before)]
            lines.append([part, name, what, *values, "", "measured once"])
    return lines


def _ratio(value: float) -> str:
    return f"{value:.2f}"
