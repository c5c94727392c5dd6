"""Compare runs by their configs, metrics, and scores: `transformer_jax.compare(["a", "b"])`.

This module does not load model parameters.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.config.validation import checked
from transformer_jax.errors import UsageError
from transformer_jax.files import JsonObject
from transformer_jax.inference.ensemble import require_single
from transformer_jax.inference.history import (
    SCORE_NAMES,
    MetricsTable,
    metric_by_step,
    metric_names,
    metrics_table,
    plot_metrics,
    stored_evaluations,
)
from transformer_jax.inference.summary import html_table
from transformer_jax.inference.trained_run import Run
from transformer_jax.remote.copies import local_path
from transformer_jax.runs.grouping import group_runs
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.visualization.text import printable

if TYPE_CHECKING:
    from transformer_jax.visualization.style import Picture


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs, grouped by all config fields except the seed."""

    groups: dict[str, tuple[RunFolder, ...]]
    """The runs in each group, which differ only in their seed, keyed by the group's label."""
    metrics: dict[Path, MetricsTable]

    def __repr__(self) -> str:
        labels = ", ".join(f"{printable(k)}: {len(runs)}" for k, runs in self.groups.items())
        return f"Comparison({labels})"

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self.table for name in row))
        rows = [[_format(row.get(name)) for name in names] for row in self.table]
        return f"<div>{html.escape(repr(self))}</div>{html_table([names, *rows])}"

    @property
    def table(self) -> list[JsonObject]:
        """The comparison as a list with one row for each run, which `pandas.DataFrame` accepts.

        Each row starts with "group", "run", "seed", the config fields in which the runs differ, and
        "step". Keys such as "dev/perplexity" map to the last value of a metric on the development
        set. Keys such as "evaluation/test/bleu" map to a split's scores at the last evaluated step.
        """
        runs = [(label, run) for label, runs in self.groups.items() for run in runs]
        first = runs[0][1].config
        keys = dict.fromkeys(key for _, run in runs for key in first.differences(run.config))
        fields = [".".join(key) for key in keys if key != ("train", "seed")]
        return [self._row(label, run, fields) for label, run in runs]

    def _row(self, label: str, run: RunFolder, fields: Sequence[str]) -> JsonObject:
        values, metrics = run.config.by_field(), self.metrics[run.path]
        row: JsonObject = {"group": label, "run": str(run.path), "seed": values["train.seed"]}
        row |= {field: values[field] for field in fields}
        # A packaged model does not contain metrics.
        last = 0 if run.package is None else run.package.steps[-1]
        row["step"] = metrics[-1]["step"] if metrics else last
        for name in metric_names(metrics):
            if name.startswith("dev/") and name != "dev/time":
                row[name] = list(metric_by_step(metrics, name).values())[-1]
        for scores in stored_evaluations(run):
            prefix = f"evaluation/{scores['split']}"
            row |= {f"{prefix}/{key}": scores[key] for key in SCORE_NAMES if key in scores}
        return row

    def plot(self, *names: str) -> "Picture":
        """Plot metrics such as "dev/perplexity" by step, with one line for each group.

        If a group has several runs, the line shows their mean (the geometric mean for perplexity),
        and the band extends from the lowest to the highest value. By default, the plot shows the
        training loss as well as the perplexity and BLEU on the development set.

        Raises:
            UsageError: no run has a metric with one of these names, or there are no metrics.
        """
        metrics = {
            label: [self.metrics[run.path] for run in runs] for label, runs in self.groups.items()
        }
        return plot_metrics(metrics, *names)


@checked
def compare(runs: str | Path | Run | Iterable[str | Path | Run]) -> Comparison:
    """Compare runs, each given as a path or as a loaded run.

    Raises:
        UsageError: no runs are given, a path is not a run or is listed twice, or the runs have
            different text or vocabularies, so their metrics cannot be compared.
        StorageError: a run cannot be read.
    """
    if isinstance(runs, str | Path | Run):
        runs = [runs]
    runs = list(runs)
    for run in runs:
        if isinstance(run, Run):
            require_single(run)
    folders = [x.folder if isinstance(x, Run) else RunFolder.open(local_path(x)) for x in runs]
    if not folders:
        raise UsageError("there is no run to compare")
    metrics = {folder.path: metrics_table(folder.path) for folder in folders}
    return Comparison(group_runs(folders), metrics)


def _format(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
