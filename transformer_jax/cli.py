"""The command line: `transformer-jax VERB ...`. JAX is imported by the verb that needs it.

A verb is a dataclass of its arguments with a method `run`. Verbs that begin with a config
have every field of it as an option, --SECTION.FIELD.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional

from transformer_jax import configfiles
from transformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Row,
    TrainConfig,
    nearest,
)
from transformer_jax.errors import DataError, ProjectError, UsageError

# Results go to standard output; notes and progress to standard error.
OUT = Console(highlight=False, markup=False, soft_wrap=True)
NOTES = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)


@dataclass(frozen=True)
class _Fields:
    """The sections of a config as options."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def config(self) -> Config:
        """Return the config with the command line's changes; tell what may not be meant."""
        config = Config(self.model, self.data, self.train, self.decode)
        for note in config.notes():
            NOTES.print(note)
        return config

    def beginning_with(self, config: Config) -> Self:
        """Return the same with another config's fields."""
        return replace(
            self, model=config.model, data=config.data, train=config.train, decode=config.decode
        )


@dataclass(frozen=True)
class Prepare(_Fields):
    """Make a config's text ready: vocabulary and pieces, kept in the cache."""

    file: Positional[str] = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""

    def run(self) -> None:
        from transformer_jax.data.prepare import SPLITS, prepare

        prepared = prepare(self.config().data)
        report = prepared.report
        OUT.print(f"corpus      {report['corpus']}")
        OUT.print(f"vocabulary  {len(prepared.tokenizer)} pieces")
        for split in SPLITS:
            left_out = {k: v for k, v in report[split].items() if k not in ("pairs", "kept")}
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            OUT.print(
                f"{split:11} {report[split]['pairs']:,} pairs, {report[split]['kept']:,} kept"
                + (f"; left out: {reasons}" if reasons else "")
            )


@dataclass(frozen=True)
class Train(_Fields):
    """Train a model: config in, run folder out."""

    file: Positional[str] = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""
    out: Path | None = None
    """The run's folder; runs/NAME of the config where it is not said."""
    init_from: Path | None = None
    """A run whose newest parameters and vocabulary this one begins with."""

    def run(self) -> None:
        path = self.out or Path("runs") / configfiles.stem(self.file)
        config = self.config()
        from transformer_jax.runs.folder import check_free

        check_free(path)
        from transformer_jax.training.loop import run_training, start

        folder = start(config, path, NOTES, init_from=self.init_from)
        run_training(folder, OUT)
        _say_next(path)


@dataclass(frozen=True)
class Resume(_Fields):
    """Go on with a run from its newest checkpoint, also past its end with more --train.steps."""

    run_folder: Positional[str] = ""
    """A run's folder."""

    def run(self) -> None:
        from transformer_jax.runs.folder import RunFolder
        from transformer_jax.training.loop import change_config, run_training

        path = Path(self.run_folder)
        folder = change_config(RunFolder.open(path), self.config())
        run_training(folder, OUT)
        _say_next(path)


@dataclass(frozen=True)
class Evaluate:
    """Translate and score a run's test set; scores and translations are kept in the run."""

    run_folder: Positional[str]
    """A run's folder."""
    set: Literal["test", "dev"] = "test"
    """Which sentences."""
    average: int | None = None
    """Mean of the last so many scheduled checkpoints; 1 is the newest alone. The run's own
    decode.average where it is not said."""
    beam_size: int | None = None
    """The run's own decode.beam_size where it is not said; 1 is greedy search."""
    json: FlagCreatePairsOff[bool] = False
    """Print the scores as one JSON object."""

    def run(self) -> None:
        from transformer_jax.inference.evaluate import evaluate

        run = _load(self.run_folder, self.average)
        decode = {} if self.beam_size is None else {"beam_size": self.beam_size}
        with Progress(console=NOTES, transient=True, disable=not NOTES.is_terminal) as bar:
            task = bar.add_task("translating", total=None)
            result, folder = evaluate(
                run, self.set, decode, progress=lambda done: bar.advance(task, done)
            )
        if self.json:
            OUT.print(json.dumps(result))
            return
        OUT.print(f"{self.set} set, {result['sentences']} sentences, step {result['step']}")
        OUT.print(f"  perplexity  {result['perplexity']:.3f} per piece")
        OUT.print(f"  exact       {result['exact']:.2%}")
        OUT.print(f"  BLEU        {result['bleu']:.2f}  {result['bleu_signature']}")
        OUT.print(f"  chrF2       {result['chrf']:.2f}  {result['chrf_signature']}")
        for example in result["examples"]:
            OUT.print(f"\n  {example['source']}\n  -> {example['hypothesis']}")
        OUT.print(f"\nkept in {folder}")
        OUT.print(f"next: echo 'forty-two' | transformer-jax translate {self.run_folder}")


@dataclass(frozen=True)
class Translate:
    """Translate standard input, line by line: one line out for each line in, in order."""

    run_folder: Positional[str]
    """A run's folder."""
    num_best: int | None = None
    """Print so many translations of each line as LINE NUMBER, SCORE, TEXT, parted by tabs."""
    average: int | None = None
    """Mean of the last so many scheduled checkpoints; 1 is the newest alone. The run's own
    decode.average where it is not said."""
    beam_size: int | None = None
    """The run's own decode.beam_size where it is not said; 1 is greedy search."""
    truncate: FlagCreatePairsOff[bool] = False
    """Read the beginning of a line that is too long, in place of an error."""

    def run(self) -> None:
        run = _load(self.run_folder, self.average)
        decode = {} if self.beam_size is None else {"beam_size": self.beam_size}
        lines = _read_lines(sys.stdin.buffer.read())
        # Told before the first translation is printed, not in the middle.
        run.translator(**decode).encode(lines, truncate=self.truncate)
        out = sys.stdout.buffer
        for start in range(0, len(lines), 1024):
            chunk = lines[start : start + 1024]
            best = run.translate_best(chunk, self.num_best or 1, truncate=self.truncate, **decode)
            for number, hypotheses in enumerate(best, start=start + 1):
                for text, score in hypotheses:
                    ranked = f"{number}\t{score:.4f}\t{text}\n"
                    out.write((f"{text}\n" if self.num_best is None else ranked).encode())
            out.flush()


@dataclass(frozen=True)
class Params(_Fields):
    """Count parameters, by module or for all rows of a sweep; nothing is allocated."""

    file: Positional[str] = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as table3."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def run(self) -> None:
        self.run_rows({"": Row(self.config())})

    def run_rows(self, rows: dict[str, Row]) -> None:
        """Print one config's modules, or a line for each row beside the paper's figure."""
        from transformer_jax.model.transformer import Transformer, parameter_counts

        counts = {
            name: parameter_counts(Transformer(row.config.model, row.config.data.vocab_size))
            for name, row in rows.items()
        }
        if self.json:
            OUT.print(json.dumps(counts[""] if list(counts) == [""] else counts))
        elif list(counts) == [""]:
            width = max(map(len, counts[""]))
            for module, count in counts[""].items():
                OUT.print(f"{module:{width}}  {count:>13,}")
        else:
            table = Table("row", "parameters", "to base", "paper, M", "to base", box=None)
            base = next(iter(rows))
            for name, row in rows.items():
                ours = counts[name]["total"]
                theirs, theirs_base = row.paper.parameters, rows[base].paper.parameters
                table.add_row(
                    name,
                    f"{ours:,}",
                    f"{(ours - counts[base]['total']) / 1e6:+.2f} M",
                    f"{theirs:g}" if theirs else "",
                    f"{theirs - theirs_base:+g}" if theirs and theirs_base else "",
                )
            for column in table.columns[1:]:
                column.justify = "right"
            OUT.print(table)


class Verb(Protocol):
    """What the command line can do."""

    def run(self) -> None:
        """Do it."""
        ...


VERBS: dict[str, type[Verb]] = {
    "prepare": Prepare,
    "train": Train,
    "resume": Resume,
    "evaluate": Evaluate,
    "translate": Translate,
    "params": Params,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. A mistake or a fault is one line."""
    try:
        _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigError as error:
        return _fail(error, 2)
    except ProjectError as error:
        return _fail(error, error.exit_code)
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more at exit.
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _fail(error: Exception, code: int) -> int:
    NOTES.print(f"transformer-jax: {error}", style=None)
    return code


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        OUT.print(_usage())
        return
    name, *rest = arguments
    if name not in VERBS:
        raise UsageError(f"no verb {name!r}{nearest(name, VERBS)} (there are {', '.join(VERBS)})")
    verb = VERBS[name]
    wants_help = "-h" in rest or "--help" in rest
    if not issubclass(verb, _Fields) or (wants_help and rest[0].startswith("-")):
        _parse(name, verb, rest).run()
        return
    if not rest or rest[0].startswith("-"):
        what = "a run's folder" if verb is Resume else "a config"
        raise UsageError(f"{name} begins with {what}: transformer-jax {name} WHAT [OPTIONS]")
    if verb is Resume:
        from transformer_jax.runs.folder import RunFolder

        rows = {"": Row(RunFolder.open(Path(rest[0])).config)}
    elif verb is Params:
        rows = configfiles.load_rows(rest[0])
    else:
        rows = {"": Row(configfiles.load_config(rest[0]))}
    parsed = {
        key: (_parse(name, verb, rest, verb().beginning_with(row.config)), row.paper)
        for key, row in rows.items()
    }
    first = next(iter(parsed.values()))[0]
    if isinstance(first, Params):
        first.run_rows({key: Row(verb.config(), paper) for key, (verb, paper) in parsed.items()})
    else:
        first.run()


def _parse(name: str, verb: type[Any], arguments: list[str], default: Any = None) -> Any:
    """Let tyro read a verb's arguments; what it says of a mistake becomes one line."""
    said = io.StringIO()
    chosen = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(verb, prog=f"transformer-jax {name}", args=arguments, **chosen)
    except SystemExit as end:
        if end.code == 0:
            raise
        raise UsageError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """Return the message of a box that tyro drew, with the first name that it proposes."""
    text = re.sub(r"[╭╮╰╯│]|^.*╭─ ", " ", box)
    parts = [" ".join(part.split()) for part in re.split(r"─{3,}", text)]
    _, message, *more = [*filter(None, parts), "", ""]
    proposed = re.search(r"Perhaps you meant: (--\S+)", " ".join(more))
    return message + (f"; did you mean {proposed[1]}?" if proposed else "")


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(
        f"  {name:{width}}  {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()
    )
    return (
        f"usage: transformer-jax VERB ...\n\n{verbs}\n\n"
        f"transformer-jax VERB --help tells the options of a verb."
    )


def _say_next(path: Path) -> None:
    OUT.print(f"run kept in {path}")
    OUT.print(f"next: transformer-jax evaluate {path}")
    OUT.print(f"      echo 'forty-two' | transformer-jax translate {path}")


def _load(path: str, average: int | None) -> Any:
    if average is not None and average < 1:
        raise UsageError(f"--average must be positive, got {average}")
    from transformer_jax.inference.run import load

    return load(path, average=average)


def _read_lines(data: bytes) -> list[str]:
    """Return the lines of UTF-8 text; only a newline ends one, and the last needs none."""
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    decoded = []
    for number, line in enumerate(lines, start=1):
        try:
            decoded.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise DataError(f"line {number} is not UTF-8: {error.reason}") from error
    return decoded
