"""What the command line shows: consoles, progress, tables of scores."""

import contextlib
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from transformer_jax.errors import (
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    TransformerJaxError,
)

# Characters that a terminal obeys: in a name or a translation they would do as they please.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_characters(text: str) -> str:
    """Return the same with such characters spelt out."""
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shell_command(*words: object) -> str:
    """Return a command of this program's as a shell takes it, whatever is in its words."""
    return shlex.join(["transformer-jax", *map(str, words)])


class PlainConsole(Console):
    """A console that shows text as it is."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(escape_control_characters(x) if isinstance(x, str) else x for x in objects), **options
        )


# Results go to standard output; notes and progress to standard error.
stdout = PlainConsole()
stderr = PlainConsole(stderr=True)


def message_and_exit_code(error: BaseException) -> tuple[str, int] | None:
    """Return what a command says of an error, in one line, and its exit code.

    None for what can only be a fault of this program.
    """
    line = f"transformer-jax: {error}"
    match error:
        case TransformerJaxError():
            return f"transformer-jax: {error.for_shell()}", error.exit_code
        case RunInterrupted():
            return line, error.exit_code
        case MemoryError():
            return "transformer-jax: this machine has no memory left", OutOfMemoryError.exit_code
        case OSError():
            # What no one nearer to it has told better.
            return line, StorageError.exit_code
        case KeyboardInterrupt():
            return "", 128 + signal.SIGINT
    return None


def run_and_report(run: Callable[[], object]) -> int:
    """Run a command; return its exit code. A mistake or a fault is one line."""
    try:
        run()
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more at exit.
        sys.stderr.close()
        return 1
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        told = message_and_exit_code(error)
        if told is None:
            raise
        line, code = told
        if line:
            stderr.print(line)
        return code
    return 0


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show what takes long, on a terminal; elsewhere name each part once."""
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing)
                if bar.disable:
                    stderr.print(f"{doing} ...")
            bar.update(tasks[doing], completed=done, total=total or None)

        yield tell


def print_scores(evaluation: Any) -> None:
    """Show an `Evaluation`."""
    result, scores = evaluation.result, evaluation.scores
    mean = (
        f", mean of {result['average_checkpoints']} checkpoints"
        if result["average_checkpoints"] > 1
        else ""
    )
    stdout.print(
        f"{result['split']} set, {scores.sentences} sentences, step {result['step']}{mean}"
    )
    stdout.print(f"  perplexity  {result['perplexity']:.3f} per piece")
    stdout.print(f"  exact       {scores.exact:.2%}")
    stdout.print(f"  BLEU        {scores.bleu:.2f}  {scores.bleu_details}")
    stdout.print(f"              {scores.bleu_signature}")
    stdout.print(f"  chrF2       {scores.chrf:.2f}  {scores.chrf_signature}")
    if "tok:none" in scores.bleu_signature:
        stdout.print(
            "  BLEU is over the words of the text as it is: tokenised BLEU, if it is tokenised"
        )
    if singles := result.get("per_checkpoint"):
        table = Table("step", "perplexity", "BLEU", "chrF2", box=None)
        for single in singles:
            values = (f"{single[key]:.2f}" for key in ("perplexity", "bleu", "chrf"))
            table.add_row(str(single["step"]), *values)
        values = (f"{x:.2f}" for x in (result["perplexity"], scores.bleu, scores.chrf))
        table.add_row("mean", *values)
        stdout.print(table)
    stdout.print()


def print_comparison(compared: list[Any], run: str, against: str) -> None:
    """Show what `significance.compare` found, if anything was compared."""
    if not compared:
        return
    table = Table("", run, against, "p", box=None)
    for c in compared:
        ours, theirs = (
            f"{c.score:.2f} ({c.mean:.2f} ± {c.interval:.2f})",
            f"{c.baseline:.2f} ({c.baseline_mean:.2f} ± {c.baseline_interval:.2f})",
        )
        table.add_row(c.metric, ours, theirs, f"{c.p:.4f}")
    stdout.print(table)
    stdout.print(f"p: how often a run that is as good as the baseline, {against}, comes to such a")
    stdout.print(
        "difference by the choice of sentences alone; under 0.05 is commonly called significant."
    )
    stdout.print("In brackets the mean and 95 % interval over resampled sets. By paired bootstrap:")
    for c in compared:
        stdout.print(f"  {c.metric:5}  {c.signature}")
    stdout.print()


def print_states(states: list[Any]) -> None:
    """Show how the runs of a sweep stand."""
    table = Table("run", "state", "step", "dev ppl", "BLEU", "left", "", box=None)
    for column in table.columns[2:6]:
        column.justify = "right"
    for state in states:
        steps = f"{state.step:,}/{state.run.config.train.steps:,}" if state.step else ""
        table.add_row(
            state.run.name,
            state.status,
            steps,
            "" if state.perplexity is None else f"{state.perplexity:.2f}",
            "" if state.bleu is None else f"{state.bleu:.1f}",
            "" if state.seconds_left is None else format_duration(state.seconds_left),
            escape_control_characters(state.note) if state.note else state.phase,
        )
    stdout.print(table)
    counts = Counter(state.status for state in states)
    stdout.print(", ".join(f"{count} {name}" for name, count in counts.items()))


def print_results(results: Any) -> None:
    """Show the rows of a report that fit a terminal."""
    table = Table("row", "change", "parameters", "perplexity", "to base", "BLEU", "p", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in results.rows.values():
        spreads = (row.scores.get(name) for name in ("perplexity", "test_bleu"))
        perplexity, bleu = ("" if s is None else f"{s.mean:.2f}" for s in spreads)
        difference = results.difference(row.name, "perplexity")
        table.add_row(
            row.name,
            row.change,
            f"{row.parameters:,}",
            perplexity,
            "" if difference is None else f"{difference:+.2f}",
            bleu,
            " ".join(f"{p:.3f}" for p in row.p.values()),
        )
    stdout.print(table)


def format_duration(seconds: float) -> str:
    """Return a time as hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
