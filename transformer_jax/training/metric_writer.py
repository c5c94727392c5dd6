"""Write a run's metrics to the terminal, to metrics.jsonl, and to trackers.

Each line of metrics.jsonl is a JSON object with "step", "split" ("train" or "dev"), "time" (seconds
since 1970), and the reported values. Except for "time", "tokens_per_second", and "utilization", the
values depend only on the config and the seed, up to rounding.
"""

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.errors import StorageError, storage_errors
from transformer_jax.runs.metrics_file import format_report, parse_report
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.tracking import Report, RunTrackers

# How to format values in the terminal. Values that are not listed are written only to files.
TERMINAL_FORMATS = {
    "loss": "loss {:.3f}",
    "perplexity": "ppl {:.3f}",
    "bleu": "BLEU {:.1f}",
    "exact": "exact {:.1%}",
    "f1": "F1 {:.1f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tok/s",
    "utilization": "util {:.0%}",
}


Callback = Callable[[dict[str, float]], object]
"""A function that receives each report: the step, and metrics such as "dev/perplexity"."""


class MetricWriter:
    """A context manager that appends metrics to a run's existing metrics."""

    def __init__(
        self, folder: RunFolder, console: Console, callback: Callback | None = None, *, step: int
    ) -> None:
        """Set up a progress bar that starts at `step`."""
        self._folder, self._console, self._callback = folder, console, callback
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
            # Show the bar only in a terminal, so that log files contain no escape codes.
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", total=folder.config.train.steps, completed=step, status=""
        )
        self._step, self._latest_values = step, ""
        self._steps = Counter[int]()

    def count_earlier(self, step: int) -> int:
        """Return the number of reports for steps before `step`."""
        return sum(count for earlier, count in self._steps.items() if earlier < step)

    def advance(self, step: int) -> None:
        """Advance the progress bar to `step`."""
        self._progress.update(self._task, completed=step)

    def set_status(self, status: str) -> None:
        """Show the current phase or the latest values next to the progress bar."""
        self._progress.update(self._task, status=status)

    def report(self, step: int, split: str, values: dict[str, float]) -> None:
        """Write values to the terminal, metrics.jsonl, and the trackers."""
        shown = "  ".join(
            form.format(values[key]) for key, form in TERMINAL_FORMATS.items() if key in values
        )
        total = self._folder.config.train.steps
        self.say(f"step {step:>{len(str(total))}}/{total}  {split:5}  {shown}")
        if split == "train":
            self._latest_values = shown
        # A report on the development set marks the end of the evaluation phase.
        self.set_status(self._latest_values)
        line = {"step": step, "split": split, **values, "time": round(time.time(), 3)}
        with storage_errors("metrics could not be written"):
            self._metrics.write(format_report(line))
        self._steps[step] += 1
        self._trackers.log(line)
        if self._callback is not None:
            self._callback({"step": step, **{f"{split}/{k}": v for k, v in values.items()}})

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text)

    def write_samples(
        self, step: int, sources: list[str], hypotheses: list[str], references: list[str]
    ) -> None:
        """Write translations to samples/step-N.txt and print the first two."""
        samples = list(zip(sources, hypotheses, references, strict=True))
        folder = self._folder.path / "samples"
        text = "\n".join(f"{s}\n  = {h}\n  ~ {r}" for s, h, r in samples) + "\n"
        with storage_errors("samples could not be written"):
            folder.mkdir(exist_ok=True)
            (folder / f"step-{step}.txt").write_text(text, "utf-8")
        self._trackers.log_samples(step, text)
        for source, hypothesis, reference in samples[:2]:
            self.say(f"    {_shorten(source)}\n      -> {_shorten(hypothesis)}")
            if hypothesis != reference:
                self.say(f"       = {_shorten(reference)}")

    def __enter__(self) -> "MetricWriter":
        path, config = self._folder.path, self._folder.config
        earlier: list[Report] = []
        with storage_errors("metrics could not be written"):
            # Line buffering preserves the metrics if the process is killed.
            self._metrics = self._folder.metrics.open("a+", buffering=1, encoding="utf-8")
            self._metrics.seek(0)
            # `truncate_metrics` has removed invalid lines.
            earlier += (parse_report(line.encode()) or {} for line in self._metrics)
        try:
            self._steps.update(report["step"] for report in earlier)
            self._trackers = RunTrackers(path, config, step=self._step, earlier=earlier)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._metrics.close()
            raise StorageError(f"{self._folder.metrics} cannot be read: {error!r}") from error
        self._progress.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._progress.stop()
        self._trackers.finish(is_complete=error is None)
        try:
            with storage_errors("metrics could not be written"):
                self._metrics.close()
        except StorageError:
            # If another error ends the run, report that error instead of the storage error.
            if error is None:
                raise


class NullWriter(MetricWriter):
    """A writer that does not write any files, for processes other than the primary one."""

    def report(self, step: int, split: str, values: dict[str, float]) -> None:
        """Do nothing."""

    def __enter__(self) -> "NullWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass


def _shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."
