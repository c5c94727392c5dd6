"""Tables that commands print: scores, comparisons, run statuses, and parameter counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table

from transformer_jax.config import Row
from transformer_jax.console import stdout
from transformer_jax.files import JsonObject
from transformer_jax.sweeps.status import check_finished

if TYPE_CHECKING:
    from transformer_jax.analysis.significance import MetricComparison
    from transformer_jax.evaluation.evaluate import Evaluation
    from transformer_jax.sweeps.status import RunStatus


# This width exceeds the width of every table.
MAX_WIDTH = 1_000_000


def format_duration(seconds: float) -> str:
    """Format a duration, as in "1 h 05 min", or in days if it exceeds 48 hours."""
    if seconds < 60:
        return "less than 1 min"
    if seconds > 48 * 3600:
        return f"{seconds / 86_400:,.1f} days"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _describe_steps(steps: list[int]) -> str:
    mean = f", mean of {len(steps)} checkpoints" if len(steps) > 1 else ""
    return f"step {steps[-1]}{mean}"


def _describe_member(member: "JsonObject") -> str:
    # The path is relative to the first run. In a sweep, a run's name is only its seed.
    parts = [part for part in Path(member["path"]).parts[-2:] if part not in ("..", ".")]
    return f"{'/'.join(parts) or member['run']} ({_describe_steps(member['steps'])})"


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print a run's scores and, if available, the scores of each averaged checkpoint."""
    result, scores = evaluation.result, evaluation.scores
    steps = _describe_steps(result["steps"])
    if members := result.get("members"):
        steps = f"ensemble of {', '.join(map(_describe_member, members))}"
    stdout.print(
        f"{result['title']}, {scores.sentences} sentences, {steps}\n"
        f"  perplexity  {result['perplexity']:.3f} per token\n"
        f"  exact       {scores.exact:.2%}{_describe_digits(result.get('by_digits', ()))}\n"
        f"  BLEU        {scores.bleu:.2f}  {scores.bleu_details}\n"
        f"              {scores.bleu_signature}\n"
        f"  chrF2       {scores.chrf:.2f}  {scores.chrf_signature}"
    )
    if (task := result.get("task")) is not None:
        from transformer_jax.evaluation.tasks import describe_task

        stdout.print("\n".join(f"  {line}" for line in describe_task(task)))
    if (compound_bleu := result["compound_bleu"]) is not None:
        stdout.print(f"  BLEU        {compound_bleu:.2f}  compound-split, as in the paper's script")
    if "tok:none" in scores.bleu_signature:
        stdout.print(
            "  BLEU splits the text at spaces: if the text is tokenized, this is tokenized BLEU"
        )
    if checkpoints := result.get("per_checkpoint"):
        from transformer_jax.evaluation.tasks import main_score

        columns = ("step", "perplexity", "BLEU", "chrF2", *main_score(result.get("task")))
        table = Table(*columns, box=None)
        rows: list[JsonObject] = [*checkpoints, {**result, "step": "mean"}]
        for one in rows:
            scores = [one[key] for key in ("perplexity", "bleu", "chrf")]
            scores += main_score(one.get("task")).values()
            table.add_row(str(one["step"]), *(f"{score:.2f}" for score in scores))
        show_table(table)
    stdout.print()


def _describe_digits(counts: Sequence[JsonObject]) -> str:
    """Format the counts of correct numbers by number of digits; return "" for other text."""
    parts = (f"{count['digits']}: {count['right']} of {count['numbers']}" for count in counts)
    return f"\n  by digits   {', '.join(parts)}" if counts else ""


def print_scores_by_length(buckets: Sequence[JsonObject]) -> None:
    """Print the scores for each range of source lengths."""
    table = _table("source tokens", "sentences", "perplexity", "BLEU", first_number=0)
    for bucket in buckets:
        last = "or more" if bucket["last"] is None else f"to {bucket['last']}"
        scores = (f"{bucket[key]:.2f}" for key in ("perplexity", "bleu"))
        table.add_row(f"{bucket['first']} {last}", f"{bucket['sentences']:,}", *scores)
    show_table(table)
    stdout.print()


def print_grid(results: Sequence[JsonObject]) -> JsonObject:
    """Print the scores for a grid of evaluations, and return the best evaluation."""
    from transformer_jax.evaluation.tasks import main_score

    all_scores = [main_score(result.get("task")) or {"BLEU": result["bleu"]} for result in results]
    [name] = all_scores[0]
    values = [scores[name] for scores in all_scores]
    best = results[values.index(max(values))]
    steps = f"the last one at step {best['step']}"
    stdout.print(
        f"{best['title']}, {best['sentences']} sentences, averages of checkpoints, {steps}"
    )
    columns = ("averaged", "beam", "alpha", "perplexity", name, "chrF2")
    table = _table(*columns, "", first_number=0, last_number=len(columns))
    for result, value in zip(results, values, strict=True):
        decode = result["decode"]
        # Greedy search does not use the length penalty.
        is_greedy = decode["beam_size"] == 1
        alpha = "" if is_greedy else f"{decode['length_penalty_alpha']:g}"
        scores = (f"{score:.2f}" for score in (result["perplexity"], value, result["chrf"]))
        settings = str(result["average_checkpoints"]), str(decode["beam_size"]), alpha
        table.add_row(*settings, *scores, f"best {name}" if result is best else "")
    show_table(table)
    return best


def print_comparison(comparisons: Sequence["MetricComparison"], run: str, baseline: str) -> None:
    """Print the comparison of two runs, with one row per metric."""
    table = Table("", run, baseline, "p", box=None)
    for c in comparisons:
        table.add_row(
            c.metric,
            f"{c.score:.2f} ({c.mean:.2f} ± {c.interval:.2f})",
            f"{c.baseline:.2f} ({c.baseline_mean:.2f} ± {c.baseline_interval:.2f})",
            f"{c.p:.4f}",
        )
    show_table(table)
    stdout.print(
        f"p: the probability that a run as good as the baseline, {baseline}, differs from it by\n"
        "at least this much, in either direction; a p below 0.05 is significant (approximate\n"
        "randomization). In parentheses: mean and 95% interval over resampled sets (bootstrap)."
    )
    for c in comparisons:
        stdout.print(f"  {c.metric:5}  {c.signature}")
    stdout.print()


def show_table(table: Table) -> None:
    """Print a table without truncating its text. By default, Rich truncates cells that do not fit.

    In a terminal, long cells wrap. If the columns still do not fit, the table is wider than the
    terminal. Outside a terminal, such as in a file, each row is one line.
    """
    for column in table.columns:
        column.overflow = "fold"
        if column.no_wrap:
            column.min_width = max(map(cell_len, (str(column.header), *map(str, column.cells))))
    unlimited = stdout.options.update(width=MAX_WIDTH)
    minimum, maximum = Measurement.get(stdout, unlimited, table)
    if maximum > stdout.width:
        table.width = max(minimum, stdout.width) if stdout.is_terminal else maximum
    stdout.print(table)


def _table(*columns: str, first_number: int, last_number: int | None = None) -> Table:
    table = Table(*columns, box=None)
    for column in table.columns[first_number:last_number]:
        column.justify = "right"
    return table


def print_statuses(statuses: Sequence["RunStatus"]) -> None:
    """Print the status of each run in a sweep and the number of runs with each status."""
    columns = ("run", "status", "step", "dev ppl", "BLEU", "left", "")
    table = _table(*columns, first_number=2, last_number=6)
    for status in statuses:
        table.add_row(
            status.run.name,
            status.status,
            f"{status.step:,}/{status.run.config.train.steps:,}" if status.step else "",
            "" if status.perplexity is None else f"{status.perplexity:.2f}",
            "" if status.bleu is None else f"{status.bleu:.1f}",
            "" if status.seconds_left is None else format_duration(status.seconds_left),
            status.note or status.phase,
        )
    show_table(table)
    counts = Counter(status.status for status in statuses)
    stdout.print(", ".join(f"{count} {name}" for name, count in counts.items()))
    check_finished(statuses)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row contains the headings and whose first two columns are text."""
    head, *body = rows
    table = _table(*head, first_number=2)
    for column in table.columns[2:]:
        column.no_wrap = True
    for row in body:
        table.add_row(*row)
    show_table(table)


def print_parameter_totals(totals: Mapping[str, int], rows: Mapping[str, Row]) -> None:
    """Print each row's parameter count next to the count in the paper, if any row has one."""
    base = next(iter(rows))
    base_paper = rows[base].paper.parameters
    has_paper = any(row.paper.parameters for row in rows.values())
    columns = ("paper, M", f"minus {base}") if has_paper else ()
    table = _table("row", "parameters", f"minus {base}", *columns, first_number=1)
    for name, row in rows.items():
        paper, difference = row.paper.parameters, totals[name] - totals[base]
        cells = [f"{paper:g}" if paper else ""]
        cells.append(f"{paper - base_paper:+g}" if paper and base_paper else "")
        to_base = f"{difference / 1e6:+.2f} M" if has_paper else f"{difference:+,}"
        table.add_row(name, f"{totals[name]:,}", to_base, *(cells if has_paper else ()))
    show_table(table)
