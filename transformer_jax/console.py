"""What the command line shows: consoles, progress, tables of scores."""

import contextlib
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from transformer_jax.config import ConfigError
from transformer_jax.errors import (
    InterruptedRunError,
    OutOfMemoryError,
    ProjectError,
    StorageError,
    UsageError,
)

# Characters that a terminal obeys: in a name or a translation they would do as they please.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return the same with such characters spelt out."""
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def command(*words: object) -> str:
    """Return a command of this program's as a shell takes it, whatever is in its words."""
    return shlex.join(["transformer-jax", *map(str, words)])


class PlainConsole(Console):
    """A console that shows text as it is."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(x) if isinstance(x, str) else x for x in objects), **options)


# Results go to standard output; notes and progress to standard error.
OUT = PlainConsole()
NOTES = PlainConsole(stderr=True)


def verdict(error: BaseException) -> tuple[str, int] | None:
    """Return what a command says of an error, in one line, and its exit code.

    None for what can only be a fault of this program.
    """
    line = f"transformer-jax: {error}"
    match error:
        case ConfigError():
            return line, UsageError.exit_code
        case ProjectError() | InterruptedRunError():
            return line, error.exit_code
        case MemoryError():
            return "transformer-jax: this machine has no memory left", OutOfMemoryError.exit_code
        case OSError():
            # What no one nearer to it has told better.
            return line, StorageError.exit_code
        case KeyboardInterrupt():
            return "", 128 + signal.SIGINT
    return None


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show what takes long, on a terminal; elsewhere name each part once."""
    with Progress(console=NOTES, transient=True, disable=not NOTES.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing)
                if bar.disable:
                    NOTES.print(f"{doing} ...")
            bar.update(tasks[doing], completed=done, total=total or None)

        yield tell


def print_scores(evaluation: Any) -> None:
    """Show an `Evaluation`."""
    result, scores = evaluation.result, evaluation.scores
    mean = f", mean of {result['average']} checkpoints" if result["average"] > 1 else ""
    OUT.print(f"{result['set']} set, {scores.sentences} sentences, step {result['step']}{mean}")
    OUT.print(f"  perplexity  {result['perplexity']:.3f} per piece")
    OUT.print(f"  exact       {scores.exact:.2%}")
    OUT.print(f"  BLEU        {scores.bleu:.2f}  {scores.bleu_details}")
    OUT.print(f"              {scores.bleu_signature}")
    OUT.print(f"  chrF2       {scores.chrf:.2f}  {scores.chrf_signature}")
    if "tok:none" in scores.bleu_signature:
        OUT.print(
            "  BLEU is over the words of the text as it is: tokenised BLEU, if it is tokenised"
        )
    if singles := result.get("singles"):
        table = Table("step", "perplexity", "BLEU", "chrF2", box=None)
        for single in singles:
            values = (f"{single[key]:.2f}" for key in ("perplexity", "bleu", "chrf"))
            table.add_row(str(single["step"]), *values)
        values = (f"{x:.2f}" for x in (result["perplexity"], scores.bleu, scores.chrf))
        table.add_row("mean", *values)
        OUT.print(table)
    OUT.print()


def print_comparison(compared: list[Any], run: str, against: str) -> None:
    """Show what `significance.compare` found, if anything was compared."""
    if not compared:
        return
    table = Table("", run, against, "p", box=None)
    for c in compared:
        ours, theirs = (
            f"{c.score:.2f} ({c.mean:.2f} ± {c.interval:.2f})",
            f"{c.against:.2f} ({c.against_mean:.2f} ± {c.against_interval:.2f})",
        )
        table.add_row(c.metric, ours, theirs, f"{c.p:.4f}")
    OUT.print(table)
    OUT.print(f"p: how often a run that is as good as the baseline, {against}, comes to such a")
    OUT.print(
        "difference by the choice of sentences alone; under 0.05 is commonly called significant."
    )
    OUT.print("In brackets the mean and 95 % interval over resampled sets. By paired bootstrap:")
    for c in compared:
        OUT.print(f"  {c.metric:5}  {c.signature}")
    OUT.print()
