"""What a run tells while it goes on: the screen, metrics.jsonl and TensorBoard, all the same.

A line of metrics.jsonl is an object with "step", "split" ("train" or "dev"), the values named
below and "time", seconds since 1970. All but "time" and rates are functions of the seed.
"""

import json
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboard.summary import Writer

from transformer_jax.errors import StorageError
from transformer_jax.runs.run_directory import RunDirectory

# How values are shown; what is not here goes to the files alone.
SHOWN = {
    "loss": "loss {:.3f}",
    "perplexity": "ppl {:.3f}",
    "bleu": "BLEU {:.1f}",
    "exact": "exact {:.1%}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tok/s",
    "utilization": "util {:.0%}",
}


class MetricWriter:
    """A context that reports a run; it goes on where an earlier one stopped."""

    def __init__(self, folder: RunDirectory, console: Console, *, step: int) -> None:
        self._folder = folder
        self.console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[doing]}"),
            console=console,
            transient=True,
            # Where nobody looks, lines alone: no escape codes in files.
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", total=folder.config.train.steps, completed=step, doing=""
        )

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def doing(self, what: str) -> None:
        """Say beside the bar what goes on, or how fast."""
        self._progress.update(self._task, doing=what)

    def report(self, step: int, split: str, values: dict[str, float]) -> None:
        """Write values to every place.

        Raises:
            StorageError: a file cannot be written.
        """
        shown = "  ".join(form.format(values[key]) for key, form in SHOWN.items() if key in values)
        total = self._folder.config.train.steps
        self.say(f"step {step:>{len(str(total))}}/{total}  {split:5}  {shown}")
        if split == "train":
            self.doing(shown)
        line = {"step": step, "split": split, **values, "time": round(time.time(), 3)}
        try:
            self._metrics.write(json.dumps(line) + "\n")
            self._add_events(line)
        except OSError as error:
            raise _unwritten("metrics", error) from error

    def _add_events(self, line: dict[str, Any]) -> None:
        for key in line.keys() - {"step", "split", "time"}:
            self._events.add_scalar(f"{line['split']}/{key}", float(line[key]), int(line["step"]))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def sample(
        self, step: int, sources: list[str], hypotheses: list[str], references: list[str]
    ) -> None:
        """Show the first translations of a scored step, and keep all."""
        rows = list(zip(sources, hypotheses, references, strict=True))
        folder = self._folder.path / "samples"
        text = "\n".join(f"{s}\n  = {h}\n  ~ {r}" for s, h, r in rows)
        try:
            folder.mkdir(exist_ok=True)
            Path(folder / f"step-{step}.txt").write_text(text + "\n", "utf-8")
        except OSError as error:
            raise _unwritten("samples", error) from error
        for source, hypothesis, reference in rows[:2]:
            self.say(f"    {_short(source)}\n      -> {_short(hypothesis)}")
            if hypothesis != reference:
                self.say(f"       = {_short(reference)}")

    def __enter__(self) -> "MetricWriter":
        events = self._folder.path / "tensorboard"
        try:
            # Made anew from the lines that count: whoever was killed wrote some twice.
            shutil.rmtree(events, ignore_errors=True)
            self._events: Any = Writer(str(events))
            with self._folder.metrics.open("a+", encoding="utf-8") as earlier:
                earlier.seek(0)
                for line in earlier:
                    self._add_events(json.loads(line))
            # A line at a time, so that a run that is killed has told what it did.
            self._metrics = self._folder.metrics.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise _unwritten("metrics", error) from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(f"{self._folder.metrics} cannot be read: {error!r}") from error
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        try:
            self._events.close()
            self._metrics.close()
        except OSError as fault:
            # What ended the run comes first.
            if error is None:
                raise _unwritten("metrics", fault) from fault


def _unwritten(what: str, error: OSError) -> StorageError:
    return StorageError(f"{what} could not be written: {error.strerror or error}")


class NullWriter(MetricWriter):
    """The logbook of a process that reports nothing: another of the same run does."""

    def report(self, step: int, split: str, values: dict[str, float]) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def sample(
        self, step: int, sources: list[str], hypotheses: list[str], references: list[str]
    ) -> None:
        """Do nothing."""

    def __enter__(self) -> "NullWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


def _short(text: str, width: int = 100) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."
