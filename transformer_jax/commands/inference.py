"""What a trained run is for: `evaluate`, `translate`."""

import codecs
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from transformer_jax.commands.base import PathCommand, RunArgument, translate_command
from transformer_jax.console import (
    escape_control_characters,
    print_comparison,
    print_scores,
    progress_bar,
    stderr,
    stdout,
)
from transformer_jax.errors import DataError, StorageError, UsageError


@dataclass(frozen=True)
class RunCommand(PathCommand):
    """Base of the verbs that take a trained run as it is."""

    run_folder: RunArgument
    """A run's folder."""
    average_checkpoints: int | None = None
    """Mean of the last so many scheduled checkpoints; 1 is the newest by itself. The run's own
    decode.average_checkpoints where it is not said."""
    step: int | None = None
    """Of the checkpoint, or of the last one of a mean; the newest where it is not said."""
    beam_size: Annotated[int | None, arg(aliases=["--beam"])] = None
    """The run's own decode.beam_size where it is not said; 1 is greedy search."""

    def load(self, path: Path | None = None) -> Any:
        """Return the run, or another with the same options."""
        from transformer_jax.runs.run_directory import RunDirectory

        if self.average_checkpoints is not None and self.average_checkpoints < 1:
            raise UsageError(
                f"--average-checkpoints must be positive, got {self.average_checkpoints}"
            )
        # Before JAX is there: whoever mistook the path hears of it at once.
        folder = RunDirectory.open(path or Path(self.run_folder))
        from transformer_jax.inference.trained_run import load

        return load(folder.path, average_checkpoints=self.average_checkpoints, step=self.step)

    @property
    def which(self) -> str:
        """The options that say which checkpoints are meant, as they were given."""
        given = {"--average-checkpoints": self.average_checkpoints, "--step": self.step}
        return "".join(f" {key} {value}" for key, value in given.items() if value is not None)

    @property
    def decode(self) -> dict[str, Any]:
        """The fields of the run's `DecodeConfig` that the command line changes."""
        return {} if self.beam_size is None else {"beam_size": self.beam_size}


@dataclass(frozen=True)
class Evaluate(RunCommand):
    """Translate and score a run's test set; scores and translations are kept in the run."""

    split: Literal["test", "dev"] = "test"
    """Which sentences."""
    per_checkpoint: FlagCreatePairsOff[bool] = False
    """Score each checkpoint of the average by itself too."""
    baseline: Path | None = None
    """Another run, the baseline, with which this one is compared by paired bootstrap. Options hold
    for both; what is not said is each run's own."""
    json: FlagCreatePairsOff[bool] = False
    """Print the scores as one JSON object."""

    def run(self) -> None:
        from transformer_jax.runs.run_directory import RunDirectory

        # Told before JAX is there, as is a mistake in the run's own path.
        if self.baseline is not None:
            RunDirectory.open(self.baseline)
        run = self.load()
        other = None if self.baseline is None else self.load(self.baseline)
        if self.per_checkpoint and run.average_checkpoints == 1:
            raise UsageError(
                "--per-checkpoint is for a mean of checkpoints: say --average-checkpoints 2, or more"
            )
        from transformer_jax.data.corpora import bleu_tokenizer
        from transformer_jax.inference import significance
        from transformer_jax.inference.evaluate import evaluate
        from transformer_jax.inference.evaluation_files import save_evaluation

        compared: list[Any] = []
        hypotheses: list[str] = []
        against: dict[str, Any] = {}
        with progress_bar() as progress:
            if other is not None:
                significance.check_comparable(run, other, self.split, progress)
            evaluation = evaluate(
                run, self.split, self.decode, per_checkpoint=self.per_checkpoint, progress=progress
            )
            if other is not None:
                theirs = evaluate(other, self.split, self.decode, progress=progress)
                compared = significance.compare(evaluation, theirs, bleu_tokenizer(run.config.data))
                against = significance.describe(other, theirs, compared)
                hypotheses = theirs.hypotheses
        if self.json:
            stdout.print(json.dumps(evaluation.result | ({"baseline": against} if against else {})))
        else:
            print_scores(evaluation)
            print_comparison(compared, self.run_folder, str(self.baseline))
            for source, hypothesis in list(zip(*evaluation[1:3], strict=True))[:3]:
                stdout.print(f"  {source}\n  -> {hypothesis}\n")
        try:
            folder = save_evaluation(run, evaluation)
            if against:
                significance.save_comparison(folder, against, hypotheses)
            stderr.print(f"kept in {folder}")
        except StorageError as error:
            stderr.print(f"note: {error}")
        if not self.json:
            stdout.print(f"next: {translate_command(run.folder, self.which)}")


@dataclass(frozen=True)
class Translate(RunCommand):
    """Translate standard input, line by line: one line out for each line in, in order."""

    n_best: int | None = None
    """Print so many translations of each line as LINE NUMBER, SCORE, TEXT, parted by tabs."""
    truncate: FlagCreatePairsOff[bool] = False
    """Read the beginning of a line that is too long, in place of an error."""

    def run(self) -> None:
        run = self.load()
        if sys.stdin.isatty():
            stderr.print("lines to translate, then Ctrl-D:")
        lines = _read_lines(sys.stdin.buffer.read())
        # Told before the first translation is printed, not in the middle.
        run.translator(**self.decode).encode(lines, truncate=self.truncate)
        num_best = 1 if self.n_best is None else self.n_best
        out = sys.stdout.buffer
        for start in range(0, len(lines), 1024):
            chunk = lines[start : start + 1024]
            best = run.translate_best(chunk, num_best, truncate=self.truncate, **self.decode)
            for number, hypotheses in enumerate(best, start=start + 1):
                for text, score in hypotheses:
                    ranked = f"{number}\t{score:.4f}\t{text}\n"
                    line = f"{text}\n" if self.n_best is None else ranked
                    out.write(
                        (escape_control_characters(line) if sys.stdout.isatty() else line).encode()
                    )
            out.flush()


def _read_lines(data: bytes) -> list[str]:
    """Return the lines of UTF-8 text; only a newline ends one, and the last needs none.

    As in files to train on, a byte-order mark at the beginning is no text.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    decoded = []
    for number, line in enumerate(lines, start=1):
        try:
            decoded.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise DataError(f"line {number} is not UTF-8: {error.reason}") from error
    return decoded
