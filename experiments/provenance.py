"""Describe how a study's runs were trained, using the notes from a sweep's report."""

from transformer_jax.reports.footnotes import (
    ANALYSIS,
    describe_experiment,
    list_origins,
    to_markdown_list,
)
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import read_status


def describe_sweep(sweep: Sweep, command: str, analysis: str = ANALYSIS) -> str:
    """Return Markdown notes about the corpus, budget, search, analysis, commands, and commits.

    Args:
        sweep: the study's sweep.
        command: the command that writes the study's report.
        analysis: the note that refers to docs/statistics.md.
    """
    statuses = [read_status(run) for run in sweep.runs]
    experiment = describe_experiment(sweep, statuses)
    return to_markdown_list([*experiment, analysis, *list_origins(sweep, statuses, command)])
