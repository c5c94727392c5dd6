"""One result beside another: what became faster, what slower, and what the spread explains."""

import itertools
from collections.abc import Sequence

from experiments.benchmark.results import Measured, Part, Results, middle, table
from experiments.benchmark.rounds import Spread, spread
from transformer_jax.errors import UsageError

HEAD = ("part", "contestant", "of", "before", "after", "after / before", "middle half", "")


def quotients(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Return the median and quartiles of every value after over every value before.

    Rounds of two results are no pairs, so all pairs count alike.
    """
    return spread([a / b for a, b in itertools.product(after, before)])


def verdict(found: Spread) -> str:
    """Say what a quotient of speeds means."""
    if found.holds_one:
        return "within the spread"
    return "faster" if found.low > 1 else "slower"


def compared(before: Results, after: Results) -> str:
    """Return a table of what both results have, and lines about what only one has.

    Speeds are compared as ratios to the same reference where both have it, for these hold
    whatever else the machines did; else as they are.

    Raises:
        UsageError: they have nothing in common.
    """
    lines: list[list[str]] = []
    said: list[str] = []
    parts = {part.name: part for part in before.parts}
    for later in after.parts:
        earlier = parts.pop(later.name, None)
        if earlier is None:
            said.append(f"{later.name}: only after")
            continue
        changed = [
            f"{key} {earlier.work.get(key)} -> {later.work.get(key)}"
            for key in sorted({*earlier.work, *later.work})
            if earlier.work.get(key) != later.work.get(key)
        ]
        if changed:
            said.append(f"{later.name}: not the same work ({', '.join(changed)}), not compared")
            continue
        lines += _lines(earlier, later)
        for name in sorted({*earlier.contestants} ^ {*later.contestants}):
            when = "after" if name in later.contestants else "before"
            said.append(f"{later.name}, {name}: only {when}")
    said += [f"{name}: only before" for name in parts]
    for key, value in before.machine.items():
        if after.machine.get(key) != value:
            said.append(f"another machine: {key} {value} -> {after.machine.get(key)}")
    if not lines:
        raise UsageError(f"nothing to compare: {'; '.join(said) or 'no parts'}")
    return "\n\n".join([table(HEAD, lines), *(["\n".join(f"- {x}" for x in said)] if said else [])])


def _lines(earlier: Part, later: Part) -> list[list[str]]:
    reference = later.reference if later.reference == earlier.reference else None
    lines = list[list[str]]()
    for name in later.contestants:
        if name not in earlier.contestants:
            continue
        if reference is None:
            what = f"{later.unit} a second"
            both = [part.contestants[name].speeds for part in (earlier, later)]
        elif name == reference:
            continue
        else:
            what = f"speed to {reference}"
            both = [part.ratios(name) for part in (earlier, later)]
        found = quotients(*both)
        values = [f"{spread(x).median:.4g}" for x in both]
        lines.append([later.name, name, what, *values, _ratio(found.median), middle(found)])
        lines[-1].append(verdict(found))
        lines += _single(later.name, name, earlier.contestants[name], later.contestants[name])
    return lines


def _single(part: str, name: str, earlier: Measured, later: Measured) -> list[list[str]]:
    """Compare what was measured once, which has no spread."""
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
