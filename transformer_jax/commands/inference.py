"""The commands `translate`, `score`, and `package`, and base classes for commands with a model."""

import codecs
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from transformer_jax.commands.arguments import as_option, name_options
from transformer_jax.commands.base import (
    PathCommand,
    RunArgument,
    check_new_file,
    translate_command,
)
from transformer_jax.config import DecodeConfig
from transformer_jax.console import (
    escape_control_characters,
    progress_bar,
    shell_command,
    stderr,
    stdout,
)
from transformer_jax.data.text_files import (
    choose_compression,
    find_format,
    note_markup,
    note_mistakes,
    read_lines,
)
from transformer_jax.errors import DataError, StorageError, UsageError
from transformer_jax.files import check_available, write_bytes
from transformer_jax.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from transformer_jax.inference.trained_run import Run
    from transformer_jax.inference.translate import Hypothesis, Translator

# The number of lines that `translate` processes before it prints their translations.
CHUNK_LINES = 1024
SEARCH_OPTIONS = ("beam_size", "alpha", "beam_end")


def load_run(path: Path, average_checkpoints: int | None, step: int | None) -> "Run":
    """Load a run from the checkpoints that the arguments select."""
    if average_checkpoints is not None and average_checkpoints < 1:
        raise UsageError(f"--average-checkpoints must be positive, got {average_checkpoints}")
    # Open the run before importing JAX, so that a wrong path is reported immediately.
    run = RunFolder.open(path)
    from transformer_jax.inference.trained_run import load

    return load(run.path, average_checkpoints=average_checkpoints, step=step)


@dataclass(frozen=True)
class CheckpointCommand(PathCommand):
    """Base class for commands that load a run's checkpoints."""

    run_folder: RunArgument
    """A run's folder."""
    average_checkpoints: int | None = None
    """Average the parameters of the last N scheduled checkpoints. If N is 1, use one checkpoint,
    which can be unscheduled. Default: the run's decode.average_checkpoints, or all scheduled
    checkpoints if there are fewer."""
    step: int | None = None
    """The step of the checkpoint to load, or of the last checkpoint to average. Default: the
    latest."""

    def load(self, path: Path | None = None) -> "Run":
        """Load the command's run, or the run at `path`, from the selected checkpoints."""
        return load_run(path or Path(self.run_folder), self.average_checkpoints, self.step)

    @property
    def checkpoint_options(self) -> str:
        """The options that select the checkpoints, formatted for a shell command."""
        given = self.select_given("average_checkpoints", "step").items()
        return "".join(f" {as_option(name)} {value}" for name, value in given)


@dataclass(frozen=True)
class RunCommand(CheckpointCommand):
    """Base class for commands that translate with a run's model."""

    beam_size: Annotated[int | None, arg(aliases=["--beam"])] = None
    """Number of hypotheses in the beam; 1 means greedy search. Default: the run's
    decode.beam_size."""
    alpha: float | None = None
    """Exponent of the length penalty. Default: the run's decode.length_penalty_alpha."""
    beam_end: Literal["tensor2tensor", "any"] | None = None
    """Which hypotheses can finish at each step. With `tensor2tensor`, as in the paper's code, a
    hypothesis can finish if its end-of-sentence token is among the 2 x beam_size most likely
    continuations. With `any`, every hypothesis can finish. Default: the run's decode.beam_end."""

    @property
    def decode_changes(self) -> dict[str, Any]:
        """The `DecodeConfig` fields that the options override, with their new values."""
        given = self.select_given(*SEARCH_OPTIONS).items()
        changes = {"length_penalty_alpha" if key == "alpha" else key: x for key, x in given}
        with name_options(length_penalty_alpha="alpha"):
            DecodeConfig(**changes)
        return changes


@dataclass(frozen=True)
class EnsembleCommand(RunCommand):
    """Base class for commands that translate with one or more runs."""

    ensemble: Annotated[tuple[Path, ...], arg(metavar="RUN ...")] = ()
    """Average the probabilities of RUN and of these runs, which must have the same vocabulary."""

    def load_all(self) -> "Run":
        """Load the command's run, or the ensemble of all given runs."""
        run = self.load()
        if not self.ensemble:
            return run
        from transformer_jax.inference.ensemble import ensemble

        return ensemble([run, *map(self.load, self.ensemble)])


@dataclass(frozen=True)
class Translate(EnsembleCommand):
    """Translate standard input line by line, printing one line of output per line of input."""

    n_best: int | None = None
    """Print the N best translations of each line. Each line of output contains the number of the
    input line, a score, and a translation, separated by tabs. If the search finishes fewer than N
    translations, the command prints only the finished ones. Every input line has at least one
    translation, and a blank line has one empty translation, or N empty samples."""
    truncate: FlagCreatePairsOff[bool] = False
    """Truncate lines that are too long instead of reporting an error."""
    alignments: Path | None = None
    """Write the word alignment of each line and its first translation to this new file, as
    SOURCE-TARGET for each pair of aligned words, such as 0-0 1-2. A file whose name ends in .gz,
    .xz, or .bz2 is compressed."""
    prefixes: Path | None = None
    """A file with a line for each line of input: the text with which its translation must begin. An
    empty line has no effect."""
    sample: FlagCreatePairsOff[bool] = False
    """Draw translations at random instead of searching; with --n-best N, draw N samples of each
    line. A sample depends only on the text of its line, its number among the line's samples, and
    these options."""
    mbr: Annotated[int | None, arg(metavar="N")] = None
    """Draw N samples of each line, and print the sample with the minimum Bayes risk, which is the
    one with the highest mean chrF against all samples."""
    temperature: float | None = None
    """For samples: divide the logits by this number. Default: 1."""
    top_k: int | None = None
    """For samples: draw only from the K likeliest tokens. Default: all."""
    top_p: float | None = None
    """For samples: draw only from the smallest set of the likeliest tokens whose total probability
    is at least P. Default: 1."""
    seed: int | None = None
    """For samples: the seed of the random numbers. Default: 0."""

    def run(self) -> None:
        self._check_options()
        if self.alignments is not None:
            check_new_file(self.alignments, "alignments")
            choose_compression(self.alignments)
        prefixes = None if self.prefixes is None else list(read_lines(self.prefixes))
        run = self.load_all()
        from transformer_jax.inference.translate import choose_minimum_risk

        translator = self._translator(run)
        if sys.stdin.isatty():
            stderr.print("enter lines to translate, then Ctrl-D:")
        lines = _decode_lines(sys.stdin.buffer.read())
        if prefixes is not None and len(prefixes) != len(lines):
            files = f"{self.prefixes} and standard input"
            numbers = f"{len(prefixes)} and {len(lines)}"
            raise DataError(f"the numbers of lines in {files} differ: {numbers}")
        if self.alignments is not None:
            run.align([], [])  # Raises an error if the model cannot align words.
        # Check all lines first, so that an error is reported before any translation is printed.
        count = next((n for n in (self.mbr, self.n_best) if n is not None), 1)
        options: dict[str, Any] = {"num_best": count, "truncate": self.truncate}
        translator.check(lines, prefixes=prefixes, **options)
        note_markup("standard input", lines)
        num_short, alignments = 0, list[str]()
        for start in range(0, len(lines), CHUNK_LINES):
            chunk = lines[start : start + CHUNK_LINES]
            begin = None if prefixes is None else prefixes[start : start + CHUNK_LINES]
            best = translator.translate(run.params, chunk, prefixes=begin, **options)
            with_text = [x for x, line in zip(best, chunk, strict=True) if line.strip()]
            num_short += sum(len(hypotheses) < count for hypotheses in with_text)
            if self.mbr is not None:
                best = [[choose_minimum_risk(samples)] for samples in best]
            self._print(start, best)
            if self.alignments is not None:
                texts = [hypotheses[0].text for hypotheses in best]
                alignments += run.align(chunk, texts, truncate=True)
        if self.alignments is not None:
            content = "".join(f"{line}\n" for line in alignments).encode()
            write_bytes(self.alignments, choose_compression(self.alignments)(content))
        if num_short:
            stderr.print(
                f"note: {num_short} of {len(lines)} lines have fewer than {self.n_best} "
                "translations, because the search finished no others; to finish more, use a larger "
                "--beam-size or --beam-end any"
            )

    def _check_options(self) -> None:
        """Reject options that have no effect, before JAX is imported."""
        samples = self.sample or self.mbr is not None
        if self.mbr is not None and self.n_best is not None:
            raise UsageError("--mbr prints one translation of each line: omit --n-best")
        for name in self.select_given("temperature", "top_k", "top_p", "seed"):
            if not samples:
                raise UsageError(f"{as_option(name)} needs --sample or --mbr")
        for name in self.select_given(*SEARCH_OPTIONS):
            if samples:
                raise UsageError(
                    f"{as_option(name)} cannot be used with sampling, because no search is "
                    "performed"
                )
        for name, number in self.select_given("mbr", "n_best").items():
            if number < 1:
                raise UsageError(f"{as_option(name)} must be positive, got {number}")

    def _translator(self, run: "Run") -> "Translator":
        from transformer_jax.inference.sampling import Sampling

        given = self.select_given("temperature", "top_k", "top_p", "seed")
        with name_options():
            sampling = Sampling(**given) if self.sample or self.mbr is not None else None
        return run.translator(sampling=sampling, **self.decode_changes)

    def _print(self, start: int, best: list[list["Hypothesis"]]) -> None:
        lines: list[str] = []
        for number, hypotheses in enumerate(best, start=start + 1):
            for text, score in hypotheses:
                line = text if self.n_best is None else f"{number}\t{score:.4f}\t{text}"
                lines.append(escape_control_characters(line) if sys.stdout.isatty() else line)
        write_lines(lines)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to the standard output, in UTF-8."""
    try:
        sys.stdout.buffer.writelines(f"{line}\n".encode() for line in lines)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output could not be written: {error.strerror}") from error


@dataclass(frozen=True)
class Score(CheckpointCommand):
    """Print how likely the translations in a file are, given their sources.

    Each line of output contains the number of a pair, the natural logarithm of its translation's
    probability, and the number of tokens, separated by tabs.
    """

    source: Path | None = None
    """A file of source sentences (required): plain or compressed text with one sentence per
    line."""
    target: Path | None = None
    """A file of their translations (required)."""
    json: FlagCreatePairsOff[bool] = False
    """Print a JSON object for each pair, with the log-probability of each token."""

    def run(self) -> None:
        """Print the log-probability of each pair, and then the perplexity of all pairs."""
        if self.source is None or self.target is None:
            raise UsageError("score needs two files: --source FILE --target FILE")
        run = self.load()
        from transformer_jax.evaluation.evaluate import read_lines

        with progress_bar():
            sides = read_lines((self.source, self.target))
            scores = run.score(*sides)
        note_mistakes([self.source.name, self.target.name], sides)
        lines: list[str] = []
        for number, score in enumerate(scores, start=1):
            line = f"{number}\t{score.log_prob:.4f}\t{len(score.tokens)}"
            if self.json:
                values = {"line": number, "log_prob": score.log_prob, "tokens": score.tokens}
                line = json.dumps({**values, "log_probs": score.log_probs.tolist()})
            lines.append(line)
        write_lines(lines)
        total, count = math.fsum(x.log_prob for x in scores), sum(len(x.tokens) for x in scores)
        stderr.print(f"perplexity {math.exp(min(-total / count, 700)):.4f}, {count:,} tokens")


@dataclass(frozen=True)
class Package(CheckpointCommand):
    """Write a trained model, its vocabulary, and a model card to a small folder for sharing.

    The folder can be loaded like a run. Because the folder contains no optimizer
    state, training cannot resume from the folder.
    """

    out: Path | None = None
    """The folder to create. Default: the run's name, followed by -package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The data type of the stored parameters. `bfloat16` halves the size of the parameters and
    rounds them to two or three significant digits."""
    license: str = "unknown"
    """The license that the model card states, such as cc-by-4.0."""
    languages: Annotated[tuple[str, str] | None, arg(metavar="SOURCE TARGET")] = None
    """The source and target languages that the model card states, such as `en de`. Default: the
    languages in the config or in the file names."""
    data_note: str | None = None
    """A note for the model card about the data, in Markdown, such as the source and license of the
    training text."""

    def run(self) -> None:
        out = self.out or Path(f"{Path(self.run_folder).resolve().name}-package")
        # Check the path before importing JAX, so that errors appear immediately.
        check_available(out)
        run = self.load()
        from transformer_jax.sharing.model_card import find_scores
        from transformer_jax.sharing.packaging import package_run

        about = {"license_id": self.license, "languages": self.languages}
        folder = package_run(run, out, dtype=self.dtype, data_note=self.data_note or "", **about)
        if self.license == "unknown":
            stderr.print("note: the model card has no license; choose one with --license")
        if not find_scores(run.folder.path, run.steps):
            evaluate = shell_command("evaluate", Path(self.run_folder)) + self.checkpoint_options
            stderr.print(
                f"note: the model card has no scores; to store scores in the run, use `{evaluate}`"
            )
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        steps = ", ".join(map(str, run.steps))
        stdout.print(f"packaged in {out}: {size / 1e6:.1f} MB, {self.dtype}, steps {steps}")
        stdout.print(f"next: {translate_command(folder)}")


def _decode_lines(data: bytes) -> list[str]:
    r"""Split UTF-8 text into lines that end in "\n". The final "\n" is optional.

    Remove a byte-order mark at the start of the text and a "\r" at the end of any line, as in
    corpus files.
    """
    if kind := find_format(data):
        raise DataError(f"the input is a {kind} file, not text: unpack it first")
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    decoded: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            decoded.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise DataError(f"line {number} is not UTF-8: {error.reason}") from error
    return decoded
