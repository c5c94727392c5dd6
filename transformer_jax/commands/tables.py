"""The tables that commands print: scores, comparisons, sweeps, parameter counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from transformer_jax.config import Row
from transformer_jax.console import escape_control_characters, stdout

if TYPE_CHECKING:
    from transformer_jax.inference.evaluate import Evaluation
    from transformer_jax.inference.significance import Comparison
    from transformer_jax.sweeps.status import RunStatus


def format_duration(seconds: float) -> str:
    """Return a time in hours and minutes, such as "1 h 05 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print the scores of a run, and those of each averaged checkpoint if they were computed."""
    result, scores = evaluation.result, evaluation.scores
    count = result["average_checkpoints"]
    mean = f", mean of {count} checkpoints" if count > 1 else ""
    stdout.print(
        f"{result['split']} set, {scores.sentences} sentences, step {result['step']}{mean}"
    )
    stdout.print(f"  perplexity  {result['perplexity']:.3f} per token")
    stdout.print(f"  exact       {scores.exact:.2%}")
    stdout.print(f"  BLEU        {scores.bleu:.2f}  {scores.bleu_details}")
    stdout.print(f"              {scores.bleu_signature}")
    stdout.print(f"  chrF2       {scores.chrf:.2f}  {scores.chrf_signature}")
    if "tok:none" in scores.bleu_signature:
        stdout.print("  BLEU splits words at spaces: it is tokenized BLEU if the text is tokenized")
    if checkpoints := result.get("per_checkpoint"):
        table = Table("step", "perplexity", "BLEU", "chrF2", box=None)
        for one in checkpoints:
            values = (f"{one[key]:.2f}" for key in ("perplexity", "bleu", "chrf"))
            table.add_row(str(one["step"]), *values)
        values = (f"{x:.2f}" for x in (result["perplexity"], scores.bleu, scores.chrf))
        table.add_row("mean", *values)
        stdout.print(table)
    stdout.print()


def print_comparison(comparisons: Sequence["Comparison"], run: str, baseline: str) -> None:
    """Print the results of the paired bootstrap of two runs, with one row per metric."""
    table = Table("", run, baseline, "p", box=None)
    for c in comparisons:
        table.add_row(
            c.metric,
            f"{c.score:.2f} ({c.mean:.2f} ± {c.interval:.2f})",
            f"{c.baseline:.2f} ({c.baseline_mean:.2f} ± {c.baseline_interval:.2f})",
            f"{c.p:.4f}",
        )
    stdout.print(table)
    stdout.print(f"p: how often a run that is as good as the baseline, {baseline}, differs from it")
    stdout.print("this much due to the choice of sentences alone; below 0.05 is significant.")
    stdout.print("In parentheses: mean and 95 % interval over resampled sets (paired bootstrap).")
    for c in comparisons:
        stdout.print(f"  {c.metric:5}  {c.signature}")
    stdout.print()


def print_statuses(statuses: Sequence["RunStatus"]) -> None:
    """Print the status of each run of a sweep, and how many runs have each status."""
    table = Table("run", "status", "step", "dev ppl", "BLEU", "left", "", box=None)
    for column in table.columns[2:6]:
        column.justify = "right"
    for status in statuses:
        table.add_row(
            status.run.name,
            status.status,
            f"{status.step:,}/{status.run.config.train.steps:,}" if status.step else "",
            "" if status.perplexity is None else f"{status.perplexity:.2f}",
            "" if status.bleu is None else f"{status.bleu:.1f}",
            "" if status.seconds_left is None else format_duration(status.seconds_left),
            escape_control_characters(status.note) if status.note else status.phase,
        )
    stdout.print(table)
    counts = Counter(status.status for status in statuses)
    stdout.print(", ".join(f"{count} {name}" for name, count in counts.items()))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row has the headings. The first two columns are text."""
    head, *body = rows
    table = Table(*head, box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in body:
        table.add_row(*map(escape_control_characters, row))
    stdout.print(table)


def print_parameter_counts(counts: Mapping[str, int]) -> None:
    """Print the number of parameters of each module, and the total."""
    width = max(map(len, counts))
    for module, count in counts.items():
        stdout.print(f"{module:{width}}  {count:>13,}")


def print_parameter_totals(totals: Mapping[str, int], rows: Mapping[str, Row]) -> None:
    """Print the number of parameters of each row of a sweep next to the paper's number."""
    table = Table("row", "parameters", "to base", "paper, M", "to base", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    base = next(iter(rows))
    base_paper = rows[base].paper.parameters
    for name, row in rows.items():
        paper = row.paper.parameters
        table.add_row(
            name,
            f"{totals[name]:,}",
            f"{(totals[name] - totals[base]) / 1e6:+.2f} M",
            f"{paper:g}" if paper else "",
            f"{paper - base_paper:+g}" if paper and base_paper else "",
        )
    stdout.print(table)


def print_differences(
    differences: Mapping[str, tuple[object, object]], first: str, second: str
) -> None:
    """Print each field in which two experiments differ, with both values."""
    if not differences:
        stdout.print("no difference")
        return
    table = Table("", first, second, box=None)
    for name, values in differences.items():
        table.add_row(name, *map(str, values))
    stdout.print(table)
