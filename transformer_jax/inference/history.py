"""Read a run's metrics and scores from its files, without loading the parameters.

The files may come from an untrusted source, so this module ignores values of unexpected types.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.config.schema import is_own_search
from transformer_jax.config.validation import did_you_mean
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.files import JsonObject
from transformer_jax.runs.metrics_file import is_count, is_number, read_metrics
from transformer_jax.runs.run_folder import RunFolder, evaluation_folders, read_scores

if TYPE_CHECKING:
    from transformer_jax.visualization.style import Picture

DEFAULT_METRICS = ("train/loss", "dev/perplexity", "dev/bleu")
SCORE_NAMES = ("perplexity", "bleu", "chrf")
MetricsTable = list[dict[str, float]]
"""One row for each step. The keys are "step" and names such as "train/loss" and "dev/bleu"."""


def metrics_table(run: Path) -> MetricsTable:
    """Return a run's metrics by step. Each row contains only the metrics reported at its step.

    Raises:
        StorageError: the run's folder does not exist.
    """
    if not run.is_dir():
        raise StorageError(
            f"{run} does not exist: it was moved or deleted, or the working directory has changed"
        )
    rows: dict[int, dict[str, float]] = {}
    for report in read_metrics(run / "metrics.jsonl"):
        row = rows.setdefault(report["step"], {"step": report["step"]})
        split = str(report.get("split"))
        row |= {f"{split}/{k}": v for k, v in report.items() if k != "step" and is_number(v)}
    return [rows[step] for step in sorted(rows)]


def metric_by_step(table: MetricsTable, name: str) -> dict[int, float]:
    """Return the values of one metric, keyed by step."""
    return {int(row["step"]): row[name] for row in table if name in row}


def metric_names(table: MetricsTable) -> list[str]:
    """Return the names of all metrics, in alphabetical order."""
    return sorted({name for row in table for name in row} - {"step"})


def plot_metrics(groups: Mapping[str, Sequence[MetricsTable]], *names: str) -> "Picture":
    """Plot metrics by step, with one line for each group of runs; see `Comparison.plot`."""
    # Import matplotlib only for plots, because most users of this module need only the numbers.
    from transformer_jax.visualization.plots import Curve, average_runs, draw_curves

    tables = [table for tables in groups.values() for table in tables]
    available = sorted({name for table in tables for name in metric_names(table)})
    chosen = names or tuple(name for name in DEFAULT_METRICS if name in available)
    if not chosen:
        raise UsageError(f"there are no metrics for {', '.join(groups)}")
    for name in chosen:
        if name not in available:
            hint = did_you_mean(str(name), available)
            raise UsageError(f"no metric {name!r}{hint} (available: {', '.join(available)})")

    def average(name: str, label: str, tables: Sequence[MetricsTable]) -> Curve:
        runs = [values for table in tables if (values := metric_by_step(table, name))]
        seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
        return average_runs(f"{label}{seeds}", runs, geometric="perplexity" in name)

    return draw_curves(
        {name: [average(name, *group) for group in groups.items()] for name in chosen}
    )


def stored_evaluations(folder: RunFolder) -> list[JsonObject]:
    """Return a run's stored evaluations (settings and any `SCORE_NAMES`), by split and step.

    Those that used the run's own decode config come last at each step.
    """
    rows: list[tuple[JsonObject, bool]] = []
    for path in evaluation_folders(folder.path):
        result = read_scores(path)
        with contextlib.suppress(KeyError, TypeError):
            rows.append((_to_row(result), is_own_search(result, folder.config.decode)))
    rows.sort(key=lambda pair: (pair[0]["split"], pair[0]["step"], pair[1]))
    return [row for row, _ in rows]


def _to_row(result: JsonObject) -> JsonObject:
    decode = result["decode"]
    row = {
        "split": str(result["split"]),
        "step": result["step"],
        "average_checkpoints": result["average_checkpoints"],
        "beam_size": decode["beam_size"],
        "beam_end": str(decode["beam_end"]),
        "alpha": decode["length_penalty_alpha"],
    }
    counts = (row["step"], row["average_checkpoints"], row["beam_size"])
    if not (is_number(row["alpha"]) and all(map(is_count, counts))):
        raise TypeError("a setting is not a number")
    return row | {name: result[name] for name in SCORE_NAMES if is_number(result.get(name))}
