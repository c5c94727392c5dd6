"""Write Table 1 with measured exponents next to the paper's bounds."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from experiments.paper.table1 import CLAIMS, PROBE_LENGTH, Measurement, fit_exponent
from transformer_jax.errors import storage_errors
from transformer_jax.files import JsonObject, write_json, write_text
from transformer_jax.reports.tables import to_markdown
from transformer_jax.runs.versions import source_commit

SUMMARY = ("layer", "quantity", "paper", "fitted")
DETAILS = ("layer", "n", "d", "FLOPs", "with projections", "sequential", "path", "ms", "MB")


def summarize(measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return Table 1 with the fitted exponents, and with values for the largest n and smallest d.

    To fit the exponents of n, this function uses the smallest width and the upper half of the
    lengths. To fit the exponents of d, it uses the largest length and all widths.
    """
    largest = max(measurements, key=lambda m: (m.n, -m.d))
    rows = [[*SUMMARY, f"n = {largest.n:,}, d = {largest.d:,}"]]
    for name, claim in CLAIMS.items():
        own = [m for m in measurements if m.layer == name]
        [value] = [m for m in own if (m.n, m.d) == (largest.n, largest.d)]
        flops = f"{_power(own, 'n', 'flops')} {_power(own, 'd', 'flops')}".strip()
        sequential, path = (_power(own, "n", quantity) for quantity in ("sequential", "path"))
        rows += [
            [name, "complexity", claim.complexity, flops, f"{value.flops:,} FLOPs"],
            ["", "sequential operations", claim.sequential, sequential, f"{value.sequential:,}"],
            ["", "maximum path length", claim.path, path, f"{value.path:,}"],
        ]
        if value.seconds is not None and value.bytes is not None:
            seconds, size = f"{_round(1e3 * value.seconds)} ms", f"{_round(value.bytes / 1e6)} MB"
            rows += [
                ["", "time", "", _power(own, "n", "seconds"), seconds],
                ["", "memory", "", _power(own, "n", "bytes"), size],
            ]
    return rows


def list_details(measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a table with a row for each measurement."""
    rows = [list(DETAILS)]
    for m in measurements:
        exact = (m.n, m.d, m.flops, m.all_flops, m.sequential, m.path)
        milliseconds = "" if m.seconds is None else _round(1e3 * m.seconds)
        megabytes = "" if m.bytes is None else _round(m.bytes / 1e6)
        rows.append([m.layer, *(f"{value:,}" for value in exact), milliseconds, megabytes])
    return rows if any(row[-1] for row in rows[1:]) else [row[:-2] for row in rows]


def list_notes(measurements: Sequence[Measurement]) -> list[str]:
    """Return notes that explain the columns of the tables."""
    lengths, widths = sorted({m.n for m in measurements}), sorted({m.d for m in measurements})
    notes = [
        f"n from {lengths[0]:,} to {lengths[-1]:,}, d from {widths[0]:,} to {widths[-1]:,}, "
        "one sequence, float32.",
        "Complexity: FLOPs of the program's matrix products. As in the paper, the FLOPs of "
        "attention exclude the projections, which are O(n d²).",
        "Sequential operations: the longest chain of matrix products in which each needs the "
        "result of the one before it.",
        "Maximum path length: layers or loop iterations between the first and the last position. A "
        f"layer's reach is the largest distance from the middle of {PROBE_LENGTH} positions to an "
        "input that affects the output there (a nonzero gradient).",
        "O(log_k(n)) is the path length of dilated convolutions. The convolutions here have "
        "contiguous kernels, which need O(n/k) layers (section 4).",
    ]
    if measurements[0].seconds is not None:
        device = jax.devices()[0].device_kind
        notes.append(f"Time and memory are those of a forward pass on: {device}.")
        notes.append("Memory: the intermediate results and the output.")
    return notes


def write_table1(measurements: Sequence[Measurement], folder: Path, command: str) -> None:
    """Write table.md and table.json to a folder, creating the folder if necessary.

    Raises:
        StorageError: a file cannot be written.
    """
    origin = {"command": command, "commit": source_commit(), "jax": jax.__version__}
    lines = [
        "# Table 1, measured",
        "",
        f"`{command}` at commit {origin['commit']}, jax {origin['jax']}.",
        "",
        to_markdown(summarize(measurements)),
        "",
        *(f"- {note}" for note in list_notes(measurements)),
        "",
        to_markdown(list_details(measurements)),
        "",
    ]
    result: JsonObject = {**origin, "measurements": [asdict(m) for m in measurements]}
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "table.md", "\n".join(lines))
        write_json(folder / "table.json", result)


def _round(value: float) -> str:
    """Format a number with three significant digits, such as "0.0164" or "1,090"."""
    return f"{float(f'{value:.3g}'):,g}"


def _power(measurements: Sequence[Measurement], variable: str, quantity: str) -> str:
    """Return a fitted power such as "n^1.00", or "" if the variable has a single value."""
    other = "d" if variable == "n" else "n"
    choose = min if other == "d" else max
    fixed = choose(getattr(m, other) for m in measurements)
    points = sorted(
        (getattr(m, variable), getattr(m, quantity))
        for m in measurements
        if getattr(m, other) == fixed
    )
    if variable == "n":
        points = points[-max(2, -(-len(points) // 2)) :]
    if len(points) < 2:
        return ""
    x, y = zip(*points, strict=True)
    # Adding zero turns -0 into 0.
    return f"{variable}^{round(fit_exponent(x, y), 2) + 0.0:.2f}"
