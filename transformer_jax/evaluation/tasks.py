"""Scores for tasks other than translation. `data.task` selects the task."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformer_jax.evaluation.parsing import describe_parses, read_references, score_parses
from transformer_jax.files import JsonObject
from transformer_jax.registry import Registry


class Task(NamedTuple):
    """The functions that score a task, and the task's main score."""

    main_score: str
    """The key of the main score, which metrics and reports show. Higher is better."""
    check: Callable[[Sequence[str], Sequence[str]], object]
    """A function of (sources, references) that raises DataError if the references are invalid."""
    score: Callable[[Sequence[str], Sequence[str], Sequence[str]], JsonObject]
    """A function of (sources, hypotheses, references) that returns the scores as JSON data."""
    describe: Callable[[JsonObject], list[str]]
    """A function that formats these scores as the lines that `evaluate` prints."""


TASKS = Registry[Task | None]("data.task")
# BLEU and chrF are the only scores of translations.
TASKS.register("translation")(None)
TASKS.register("parsing")(Task("f1", read_references, score_parses, describe_parses))


def check_task(name: str, sources: Sequence[str], references: Sequence[str]) -> None:
    """Raise DataError, before a long search, if a task cannot score these references."""
    if (task := TASKS[name]) is not None:
        task.check(sources, references)


def score_task(
    name: str, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> JsonObject | None:
    """Return a task's scores with "name" and "main_score", or None if the task is translation."""
    if (task := TASKS[name]) is None:
        return None
    values = task.score(sources, hypotheses, references)
    return {"name": name, "main_score": task.main_score, **values}


def main_score(values: JsonObject | None) -> dict[str, float]:
    """Return {name: value} for the main score in `score_task`'s result, or {} if that is None."""
    return {} if values is None else {values["main_score"]: values[values["main_score"]]}


def describe_task(values: JsonObject) -> list[str]:
    """Return lines that describe the result of `score_task`."""
    task = TASKS[values["name"]]
    return [] if task is None else task.describe(values)
