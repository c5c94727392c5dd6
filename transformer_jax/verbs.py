"""The verbs of the command line: each a dataclass of its arguments with a method `run`.

JAX is imported inside the methods, so that help and mistakes come at once.
"""

import abc
import argparse
import codecs
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from transformer_jax import configfiles
from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    Row,
    TrainConfig,
)
from transformer_jax.console import (
    NOTES,
    OUT,
    command,
    print_comparison,
    print_results,
    print_scores,
    print_states,
    progress_bar,
    visible,
)
from transformer_jax.errors import DataError, StorageError, UnfinishedError, UsageError

if TYPE_CHECKING:
    from transformer_jax.runs.folder import RunFolder
    from transformer_jax.training.hosts import Hosts

ConfigArgument = Positional[
    Annotated[str, arg(metavar="CONFIG", help_behavior_hint="(required, and first)")]
]
RunArgument = Positional[Annotated[str, arg(metavar="RUN", help_behavior_hint="(required)")]]


@dataclass(frozen=True)
class ConfigVerb(abc.ABC):
    """Base of the verbs that have the sections of a config as options."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    subject: ClassVar[str] = "a config"

    @classmethod
    def begun(cls, arguments: list[str]) -> tuple[dict[str, Row], list[str]]:
        """Return the experiments that the first arguments name, and the arguments left to read."""
        return cls.experiments(arguments[0]), arguments

    @classmethod
    def experiments(cls, spec: str) -> dict[str, Row]:
        """Return the experiments that the verb's subject names."""
        return {"": Row(configfiles.load_config(spec))}

    @abc.abstractmethod
    def run(self, rows: dict[str, Row]) -> None:
        """Do what the verb does with these experiments: one, "", but for a sweep."""

    def beginning_with(self, config: Config) -> Self:
        """Return the same with another config's fields."""
        return replace(
            self, model=config.model, data=config.data, train=config.train, decode=config.decode
        )


@dataclass(frozen=True)
class Prepare(ConfigVerb):
    """Make a config's text ready: vocabulary and pieces, kept in the cache."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.data.prepare import prepare
        from transformer_jax.data.splits import SPLITS

        config = rows[""].config
        with progress_bar() as progress:
            prepared = prepare(config.data, progress=progress)
        report = prepared.report
        OUT.print(f"corpus      {report['corpus']}")
        for name, part in prepared.vocabulary.parts.items():
            OUT.print(f"{name:11} {len(part):,} pieces, sha256 {part.digest[:12]}")
        for split in (split for split in SPLITS if split in report):
            counts = dict(report[split])
            told = f"{counts.pop('pairs'):,} pairs, {counts.pop('kept'):,} kept"
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            OUT.print(f"{split:11} {told}" + (f"; dropped: {dropped}" if dropped else ""))
        batches = prepared.batches(config.data.batch_tokens, config.train.seed)
        OUT.print(f"batches     {batches.summary}")
        OUT.print(f"kept in     {prepared.folder}")


@dataclass(frozen=True)
class TrainingVerb(ConfigVerb):
    """Base of the verbs that train: alone or with other processes, watched or not."""

    supervise: FlagCreatePairsOff[bool] = False
    """Train in a process of its own and watch it: one that is stuck, or was killed, ends with one
    line and exit code 75. Of several processes that train together, each wants it."""
    hang_seconds: float = 30.0
    """With --supervise: silence between steps, at least, until training is taken for stuck; more
    where twelve steps take longer."""
    busy_seconds: float = 1800.0
    """The same at the start, and while training compiles, scores or saves."""

    coordinator: str | None = None
    """HOST:PORT where the processes meet, on the machine of process 0. Slurm, Open MPI, Kubernetes
    and Cloud TPU say this, and the next two, themselves."""
    num_processes: int | None = None
    """How many there are; 1 for this one alone."""
    process_id: int | None = None
    """Which one this is, from 0."""

    @property
    @abc.abstractmethod
    def path(self) -> Path:
        """The run's folder, which may not be there yet."""

    def under_supervisor(self, arguments: Sequence[str]) -> int:
        """Carry out the command with these arguments under a supervisor; return its exit code."""
        for name, value in (("hang", self.hang_seconds), ("busy", self.busy_seconds)):
            # NaN is refused too.
            if not value > 0:
                raise UsageError(f"--{name}-seconds must be positive, got {value}")
        from transformer_jax.training.supervisor import supervise, train_command

        return supervise(
            train_command(arguments),
            self.path,
            hang_seconds=self.hang_seconds,
            busy_seconds=self.busy_seconds,
        )

    @contextlib.contextmanager
    def joined(self, config: Config) -> Iterator["Hosts"]:
        """Meet the other processes, if there are any, that were given the same experiment."""
        from transformer_jax.training.hosts import joined

        with joined(self.path, self.coordinator, self.num_processes, self.process_id) as hosts:
            hosts.check_same(config)
            yield hosts


@dataclass(frozen=True)
class Train(TrainingVerb):
    """Train a model: config in, run folder out."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as tiny."""
    out: Path | None = None
    """The run's folder; runs/NAME of the config where it is not said."""
    init_from: Path | None = None
    """A run whose newest parameters and vocabulary this one begins with."""

    @property
    def path(self) -> Path:
        return self.out or Path("runs") / configfiles.stem(self.file)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.runs.folder import RunFolder, check_free

        with self.joined(rows[""].config) as hosts:
            # Before JAX is there, if it can be: whoever mistook the name hears of it at once.
            hosts.first(lambda: check_free(self.path))
            if self.init_from is not None and hosts.count > 1:
                raise UsageError(
                    "--init-from begins a run in one process: let it do a first step, "
                    "--train.steps 1, and go on in several by `resume`"
                )

            def begin() -> None:
                from transformer_jax.training.start import start

                with progress_bar() as progress:
                    start(
                        rows[""].config,
                        self.path,
                        NOTES,
                        init_from=self.init_from,
                        progress=progress,
                    )

            hosts.first(begin)
            _train(hosts.together(lambda: RunFolder.open(self.path)), hosts)


@dataclass(frozen=True)
class Resume(TrainingVerb):
    """Go on with a run from its newest checkpoint, also past its end with more --train.steps."""

    run_folder: RunArgument = ""
    """A run's folder."""
    subject = "a run"

    @property
    def path(self) -> Path:
        return Path(self.run_folder)

    @classmethod
    def experiments(cls, spec: str) -> dict[str, Row]:
        from transformer_jax.runs.folder import RunFolder

        return {"": Row(RunFolder.open(Path(spec)).config)}

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.runs.folder import RunFolder

        def ready() -> RunFolder:
            folder, config = RunFolder.open(self.path), rows[""].config
            with progress_bar() as progress:
                _check_text(folder, config.data, progress)
            return folder.go_on_with(config)

        with self.joined(rows[""].config) as hosts:
            _train(hosts.together(ready), hosts)


@dataclass(frozen=True)
class Sweep(ConfigVerb):
    """Train all rows of an ablation, each from several random seeds, on every device here.

    What is finished is not done again: the same command goes on with what is not.
    """

    file: ConfigArgument = ""
    """Config files, or names of shipped ones, such as table3: their rows, one after the other. The
    first row is the one that others are compared with. Beside the options below, `--data CONFIG`
    and `--train CONFIG` take that file's section, but for what a row itself changes, and `--scale
    half | small | tiny` divides width and depth."""
    rows: tuple[str, ...] = ()
    """Of the rows, these alone, beside the first."""
    seeds: int = 3
    """How many random seeds each row is trained from: a row with one proves nothing."""
    out: Path | None = None
    """The sweep's folder; sweeps/NAME where it is not said."""
    devices: str = "all"
    """How many accelerators, one run on each at a time; on a CPU how many runs side by side."""
    hang_seconds: float = 60.0
    """Of silence between two steps, at least, until a run is taken for stuck and ended."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Say what would be trained, and what it takes; do nothing."""
    retry_failed: FlagCreatePairsOff[bool] = False
    """Try again what failed."""

    @classmethod
    def begun(cls, arguments: list[str]) -> tuple[dict[str, Row], list[str]]:
        from transformer_jax.sweeps.plan import SCALES, moved, scaled

        first = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
        specs, rest = arguments[:first], arguments[first:]
        rows: dict[str, Row] = {}
        for spec in specs:
            for name, row in configfiles.load_rows(spec).items():
                if rows.setdefault(name, row) != row:
                    raise UsageError(f"{spec} has another row {name!r} than {specs[0]}")
        # What changes the beginning of all other options.
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name in ("--data", "--train"):
            parser.add_argument(name)
        parser.add_argument("--scale", choices=SCALES, default="full")
        try:
            known, rest = parser.parse_known_args(rest)
        except argparse.ArgumentError as error:
            raise UsageError(str(error)) from error
        sections = {
            name: configfiles.load_config(spec)
            for name, spec in (("data", known.data), ("train", known.train))
            if spec is not None
        }
        return scaled(moved(rows, sections), known.scale), [specs[0], *rest]

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.sweeps import launch, plan

        name = configfiles.stem(self.file)
        sweep = plan.planned(
            self.out or Path("sweeps") / name, rows, self.seeds, only=self.rows or None
        )
        places = launch.slots(None if self.devices == "all" else _whole(self.devices, "--devices"))
        OUT.print(
            f"{len(sweep.rows)} rows x {len(sweep.seeds)} seeds = {len(sweep.runs)} runs, "
            f"{len(places)} at a time"
        )
        if self.dry_run:
            for row, (seconds, size) in launch.estimates(sweep).items():
                OUT.print(f"  {row:8} about {seconds / 3600:.1f} h and {size / 1e9:.1f} GB a run")
            return
        sweep.store()
        states = launch.launch(
            sweep,
            places,
            NOTES.print,
            retry_failed=self.retry_failed,
            hang_seconds=self.hang_seconds,
        )
        print_states(states)
        _check_done(states)


@dataclass(frozen=True)
class FolderVerb(abc.ABC):
    """Base of the verbs that take a folder as it is."""

    subject: ClassVar[str] = "a run"

    @abc.abstractmethod
    def run(self) -> None:
        """Do what the verb does."""


@dataclass(frozen=True)
class Status(FolderVerb):
    """Show how each run of a sweep stands, from its files alone."""

    sweep_folder: Positional[Annotated[str, arg(metavar="SWEEP")]]
    """A sweep's folder."""
    subject = "a sweep"

    def run(self) -> None:
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.status import read_state

        states = [read_state(run) for run in Sweep.open(Path(self.sweep_folder)).runs]
        print_states(states)
        _check_done(states)


@dataclass(frozen=True)
class Report(FolderVerb):
    """Write a sweep's table: our figures beside the paper's, with spread and significance."""

    sweep_folder: Positional[Annotated[str, arg(metavar="SWEEP")]]
    """A sweep's folder."""
    subject = "a sweep"

    def run(self) -> None:
        from transformer_jax.sweeps.plan import Sweep
        from transformer_jax.sweeps.report import remarks, write_report
        from transformer_jax.sweeps.results import results

        found = results(Sweep.open(Path(self.sweep_folder)))
        folder = write_report(found)
        print_results(found)
        for told in remarks(found):
            OUT.print(told)
        OUT.print(f"kept in {folder}")


@dataclass(frozen=True)
class RunVerb(FolderVerb):
    """Base of the verbs that take a trained run as it is."""

    run_folder: RunArgument
    """A run's folder."""
    average: int | None = None
    """Mean of the last so many scheduled checkpoints; 1 is the newest by itself. The run's own
    decode.average where it is not said."""
    step: int | None = None
    """Of the checkpoint, or of the last one of a mean; the newest where it is not said."""
    beam_size: Annotated[int | None, arg(aliases=["--beam"])] = None
    """The run's own decode.beam_size where it is not said; 1 is greedy search."""

    def load(self, path: Path | None = None) -> Any:
        """Return the run, or another with the same options."""
        from transformer_jax.runs.folder import RunFolder

        if self.average is not None and self.average < 1:
            raise UsageError(f"--average must be positive, got {self.average}")
        # Before JAX is there: whoever mistook the path hears of it at once.
        folder = RunFolder.open(path or Path(self.run_folder))
        from transformer_jax.inference.run import load

        return load(folder.path, average=self.average, step=self.step)

    @property
    def which(self) -> str:
        """The options that say which checkpoints are meant, as they were given."""
        given = {"--average": self.average, "--step": self.step}
        return "".join(f" {key} {value}" for key, value in given.items() if value is not None)

    @property
    def decode(self) -> dict[str, Any]:
        """The fields of the run's `DecodeConfig` that the command line changes."""
        return {} if self.beam_size is None else {"beam_size": self.beam_size}


@dataclass(frozen=True)
class Evaluate(RunVerb):
    """Translate and score a run's test set; scores and translations are kept in the run."""

    set: Literal["test", "dev"] = "test"
    """Which sentences."""
    singles: FlagCreatePairsOff[bool] = False
    """Score each checkpoint of the average by itself too."""
    against: Path | None = None
    """Another run, the baseline, with which this one is compared by paired bootstrap. Options hold
    for both; what is not said is each run's own."""
    json: FlagCreatePairsOff[bool] = False
    """Print the scores as one JSON object."""

    def run(self) -> None:
        from transformer_jax.runs.folder import RunFolder

        # Told before JAX is there, as is a mistake in the run's own path.
        if self.against is not None:
            RunFolder.open(self.against)
        run = self.load()
        other = None if self.against is None else self.load(self.against)
        if self.singles and run.average == 1:
            raise UsageError("--singles is for a mean of checkpoints: say --average 2, or more")
        from transformer_jax.data.corpora import bleu_tokenizer
        from transformer_jax.inference import significance
        from transformer_jax.inference.evaluate import evaluate, keep

        compared: list[Any] = []
        hypotheses: list[str] = []
        against: dict[str, Any] = {}
        with progress_bar() as progress:
            if other is not None:
                significance.check_comparable(run, other, self.set, progress)
            evaluation = evaluate(
                run, self.set, self.decode, singles=self.singles, progress=progress
            )
            if other is not None:
                theirs = evaluate(other, self.set, self.decode, progress=progress)
                compared = significance.compare(evaluation, theirs, bleu_tokenizer(run.config.data))
                against = significance.describe(other, theirs, compared)
                hypotheses = theirs.hypotheses
        if self.json:
            OUT.print(json.dumps(evaluation.result | ({"against": against} if against else {})))
        else:
            print_scores(evaluation)
            print_comparison(compared, self.run_folder, str(self.against))
            for source, hypothesis in list(zip(*evaluation[1:3], strict=True))[:3]:
                OUT.print(f"  {source}\n  -> {hypothesis}\n")
        try:
            folder = keep(run, evaluation)
            if against:
                significance.keep_comparison(folder, against, hypotheses)
            NOTES.print(f"kept in {folder}")
        except StorageError as error:
            NOTES.print(f"note: {error}")
        if not self.json:
            OUT.print(f"next: {_translate_command(run.folder, self.which)}")


@dataclass(frozen=True)
class Translate(RunVerb):
    """Translate standard input, line by line: one line out for each line in, in order."""

    num_best: int | None = None
    """Print so many translations of each line as LINE NUMBER, SCORE, TEXT, parted by tabs."""
    truncate: FlagCreatePairsOff[bool] = False
    """Read the beginning of a line that is too long, in place of an error."""

    def run(self) -> None:
        run = self.load()
        if sys.stdin.isatty():
            NOTES.print("lines to translate, then Ctrl-D:")
        lines = _read_lines(sys.stdin.buffer.read())
        # Told before the first translation is printed, not in the middle.
        run.translator(**self.decode).encode(lines, truncate=self.truncate)
        num_best = 1 if self.num_best is None else self.num_best
        out = sys.stdout.buffer
        for start in range(0, len(lines), 1024):
            chunk = lines[start : start + 1024]
            best = run.translate_best(chunk, num_best, truncate=self.truncate, **self.decode)
            for number, hypotheses in enumerate(best, start=start + 1):
                for text, score in hypotheses:
                    ranked = f"{number}\t{score:.4f}\t{text}\n"
                    line = f"{text}\n" if self.num_best is None else ranked
                    out.write((visible(line) if sys.stdout.isatty() else line).encode())
            out.flush()


@dataclass(frozen=True)
class Params(ConfigVerb):
    """Count parameters, by module or for all rows of a sweep; nothing is allocated."""

    file: ConfigArgument = ""
    """A config file, FILE:ROW of a sweep, or the name of a shipped one, such as table3."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON."""

    @classmethod
    def experiments(cls, spec: str) -> dict[str, Row]:
        return configfiles.load_rows(spec)

    def run(self, rows: dict[str, Row]) -> None:
        from transformer_jax.model.transformer import Transformer, parameter_counts

        counts = {
            name: parameter_counts(
                Transformer(row.config.model, data.vocab_size, data.source_vocab_size)
            )
            for name, row in rows.items()
            for data in [row.config.data]
        }
        first = next(iter(counts.values()))
        if self.json:
            OUT.print(json.dumps(first if len(counts) == 1 else counts))
        elif len(counts) == 1:
            width = max(map(len, first))
            for module, count in first.items():
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


VERBS: dict[str, type[ConfigVerb] | type[FolderVerb]] = {
    "prepare": Prepare,
    "train": Train,
    "resume": Resume,
    "evaluate": Evaluate,
    "translate": Translate,
    "params": Params,
    "sweep": Sweep,
    "status": Status,
    "report": Report,
}


def _check_done(states: Sequence[Any]) -> None:
    failed = [state.run.name for state in states if state.name == "failed"]
    if failed:
        raise UnfinishedError(
            f"{len(failed)} of {len(states)} runs failed: {', '.join(failed)}; the same command "
            f"with --retry-failed tries them again"
        )


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} must be a number, or all, got {text!r}") from None


def _check_text(folder: Any, data: DataConfig, progress: Any) -> None:
    """Make sure that text which is named anew is the run's own, before its name is stored."""
    places = {key: getattr(data, key) for key in ("train", "dev", "test", "folder")}
    moved = replace(folder.config.data, **places)
    if moved != folder.config.data:
        from transformer_jax.data.prepare import prepare

        prepare(moved, folder.vocabulary, folder.fingerprint, is_text_moved=True, progress=progress)


def _train(folder: "RunFolder", hosts: "Hosts") -> None:
    """Train a run; the first of the processes tells how it goes."""
    from transformer_jax.training.loop import run_training

    scheduled = run_training(folder, OUT if hosts.is_first else Console(quiet=True), hosts)
    if hosts.is_first:
        _say_next(folder, scheduled)


def _say_next(folder: Any, scheduled: int) -> None:
    """Name the commands that come after training, as they will work."""
    option = " --average 1" if scheduled < folder.config.decode.average else ""
    OUT.print(f"run kept in {folder.path}")
    OUT.print(f"next: {command('evaluate', folder.path)}{option}")
    OUT.print(f"      {_translate_command(folder, option)}")


def _translate_command(folder: Any, option: str) -> str:
    """Return a command to try a run with: on words that it knows, where we know such words."""
    translate = f"{command('translate', folder.path)}{option}"
    is_embedded = folder.config.data.source == "embedded"
    return f"echo 'forty-two' | {translate}" if is_embedded else f"{translate} < FILE"


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
