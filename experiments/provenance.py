"""Select the runs of a study, and describe how they were trained, as a sweep's report does."""

from collections.abc import Sequence

from transformer_jax.reports.collect import find_failed
from transformer_jax.reports.footnotes import (
    ANALYSIS,
    describe_experiment,
    describe_failed,
    list_origins,
    to_markdown_list,
)
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import RunStatus, read_status


def select_trained(statuses: Sequence[RunStatus]) -> tuple[list[RunStatus], list[str]]:
    """Separate the finished runs that trained successfully from those that failed to train.

    Return the statuses of the former, and a list with a note about the latter. The list is empty if
    no run failed to train.
    """
    done = [status for status in statuses if status.status == "done"]
    trained: list[RunStatus] = []
    failed: list[tuple[str, float, float | None]] = []
    for row in dict.fromkeys(status.run.row for status in done):
        of_row = [status for status in done if status.run.row == row]
        unigram, perplexities = find_failed(of_row)
        failed += [(f"{row}/seed-{seed}", x, unigram) for seed, x in perplexities.items()]
        trained += [status for status in of_row if status.run.seed not in perplexities]
    return trained, describe_failed(failed)


def describe_sweep(sweep: Sweep, command: str, analysis: str = ANALYSIS) -> str:
    """Return Markdown notes about the corpus, budget, search, analysis, commands, and commits.

    Args:
        sweep: the study's sweep.
        command: the command that writes the study's report.
        analysis: the note that refers to docs/statistics.md.
    """
    statuses = [read_status(run) for run in sweep.runs]
    experiment = describe_experiment(sweep, statuses)
    _, failed = select_trained(statuses)
    origins = list_origins(sweep, statuses, command)
    return to_markdown_list([*experiment, analysis, *failed, *origins])
