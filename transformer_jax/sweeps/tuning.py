"""Choose the value of a config field for each row in a sweep, on the development set.

Each row has one trial for each combination of a value and a trial seed. The value with the lowest
mean log perplexity on the development set is chosen, and the row's other runs are trained with this
value. Trials have their own seeds and are not scored on the test set, so a value that did well in a
trial only by chance has no advantage in the report.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from transformer_jax.config import Row
from transformer_jax.config.rows import FieldValue, normalize_value, split_field
from transformer_jax.errors import DivergedError, SweepFailedError, UsageError
from transformer_jax.runs.metrics_file import is_number
from transformer_jax.sweeps.plan import (
    Sweep,
    Tuning,
    check_num_seeds,
    check_row_name,
    find_tuned,
)
from transformer_jax.sweeps.status import RunStatus, check_finished, read_status

# The difference between the first trial seed and the first seed of a sweep.
SEED_OFFSET = 10_000


def plan_tuning(
    rows: Mapping[str, Row], field: str, values: Sequence[FieldValue], num_seeds: int = 1
) -> Tuning:
    """Return a tuning that is valid for all rows."""
    section, key = split_field(field)
    if field == "train.seed":
        raise UsageError("train.seed cannot be tuned: the trials determine it")
    if section not in ("model", "train"):
        raise UsageError(f"only the fields of model and train can be tuned, got {field}")
    values = [normalize_value(field, value) for value in values]
    if len(set(values)) < max(2, len(values)):
        raise UsageError(f"tuning {field} needs at least two different values")
    check_num_seeds("the number of trial seeds", num_seeds)
    if "tune" in rows:
        raise UsageError("a tuned sweep cannot have a row named 'tune'")
    base = next(iter(rows.values())).config
    first = base.train.seed + SEED_OFFSET
    tuning = Tuning(field, tuple(values), tuple(range(first, first + num_seeds)))
    for name, row in rows.items():
        if (section, key) in base.differences(row.config):
            raise UsageError(f"row {name} sets {field} itself, so it cannot be tuned")
        for value in values:
            check_row_name(str(value))
            row.config.with_fields({field: value})
    return tuning


def open_trials(sweep: Sweep) -> Sweep:
    """Return a sweep whose runs are the trials of the rows for which no value has been chosen."""
    chosen: Mapping[str, FieldValue] = sweep.tuning.chosen if sweep.tuning else {}
    return replace(sweep, runs=[run for run in sweep.trials if run.row not in chosen])


def choose_values(sweep: Sweep, *, retry_failed: bool = False) -> Sweep:
    """Return the sweep with the best value for each row whose trials have ended.

    A trial that diverged is worse than all others. If the trials of several values are equally
    good, the first value is chosen. With `retry_failed`, failed trials do not count as ended.

    If all trials of a row diverged, the result contains these trials instead of the row and its
    runs.

    Raises:
        SweepFailedError: a trial failed for another reason, or all trials of all rows diverged.
    """
    statuses = [read_status(run) for run in open_trials(sweep).runs]
    if retry_failed:
        failed = {status.run.row for status in statuses if status.status == "failed"}
        statuses = [status for status in statuses if status.run.row not in failed]
    check_finished([status for status in statuses if not _has_diverged(status)])
    chosen: dict[str, FieldValue] = {}
    diverged: set[str] = set()
    for row in dict.fromkeys(status.run.row for status in statuses):
        own = [status for status in statuses if status.run.row == row]
        scores = trial_scores(sweep, own)
        if scores is None:
            continue
        value = min(scores, key=scores.__getitem__)
        # Without a failed trial, a sweep that omits the row would seem to succeed.
        if math.isinf(scores[value]) and any(map(_has_diverged, own)):
            diverged.add(row)
        else:
            chosen[row] = value
    return _without_rows(sweep.choose(chosen), diverged)


def _without_rows(sweep: Sweep, diverged: Collection[str]) -> Sweep:
    rows = {
        name: row
        for name, row in sweep.rows.items()
        if find_tuned(sweep.rows, name) not in diverged
    }
    if not rows and sweep.tuning is not None:
        raise SweepFailedError(f"all rows diverged with every value of {sweep.tuning.field}")
    runs = [run for run in sweep.trials if run.row in diverged]
    return replace(sweep, rows=rows, runs=runs + [run for run in sweep.runs if run.row in rows])


def trial_scores(sweep: Sweep, statuses: Sequence[RunStatus]) -> dict[FieldValue, float] | None:
    """Return the mean log perplexity of one row's trials by value; None if a trial is missing."""
    if sweep.tuning is None:
        return None
    losses: dict[FieldValue, list[float]] = {value: [] for value in sweep.tuning.values}
    for status in statuses:
        loss = _loss(status)
        if loss is None:
            return None
        losses[status.run.config.by_field()[sweep.tuning.field]].append(loss)
    complete = all(len(x) == len(sweep.tuning.seeds) for x in losses.values())
    return {value: statistics.fmean(x) for value, x in losses.items()} if complete else None


def _loss(status: RunStatus) -> float | None:
    """Return a trial's log perplexity on the development set, or None if it has not ended."""
    if _has_diverged(status):
        return math.inf
    perplexity = status.scores.get("dev", {}).get("perplexity")
    if status.status != "done" or not is_number(perplexity):
        return None
    return math.log(perplexity) if math.isfinite(perplexity) else math.inf


def _has_diverged(status: RunStatus) -> bool:
    return status.status == "failed" and status.exit_code == DivergedError.exit_code
